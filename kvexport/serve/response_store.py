"""The store of earlier responses of /v1/responses, which later requests may continue, with bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvexport.serve.errors import ApiError

_RESPONSES, _CHARACTERS = 4096, 64 << 20


@dataclass(frozen=True)
class Stored:
    body: Mapping[str, Any]  # response as JSON
    messages: Sequence[dict[str, Any]]  # conversation up to the answer, in the form that chat templates read
    size: int  # about the characters of body and messages as JSON


def _characters(value: Any) -> int:
    """Estimate how many characters a value has as JSON without writing the JSON, because images have millions."""
    if isinstance(value, str):
        return len(value) + 2
    if isinstance(value, Mapping):
        return sum(len(key) + 4 + _characters(x) for key, x in value.items())
    if isinstance(value, Sequence):
        return sum(1 + _characters(x) for x in value)
    return 8


class ResponseStore:
    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, body: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Store a response with its conversation. The least recently used responses are dropped to make room."""
        entry = Stored(body, messages, _characters(body) + _characters(messages))
        if entry.size > _CHARACTERS:  # it would drop all others, and then itself
            return
        self._stored[body["id"]] = entry
        self._size += entry.size
        while self._size > _CHARACTERS or len(self._stored) > _RESPONSES:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, name: str, param: str | None = None) -> Stored:
        """Return a stored response by its id. Raise ApiError (404) if the response was never stored or was dropped."""
        if name not in self._stored:
            message = f"there is no response {name[:80]!r}, or no longer"
            raise ApiError(404, message, param=param, code="previous_response_not_found" if param else None)
        self._stored.move_to_end(name)
        return self._stored[name]

    def remove(self, name: str) -> None:
        self._size -= self.get(name).size
        del self._stored[name]

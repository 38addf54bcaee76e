"""Responses that later ones may follow on, in memory and bounded: what is not used for longest is forgotten first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvexport.serve.errors import ApiError

_RESPONSES, _CHARACTERS = 4096, 64 << 20


@dataclass(frozen=True)
class Stored:
    """body: the response. messages: the conversation that it ends, as chat templates take it. size: characters."""

    body: Mapping[str, Any]
    messages: Sequence[dict[str, Any]]
    size: int


class ResponseStore:
    """Of one server."""

    def __init__(self) -> None:
        self._stored: OrderedDict[str, Stored] = OrderedDict()
        self._size = 0

    def put(self, body: Mapping[str, Any], messages: Sequence[dict[str, Any]]) -> None:
        """Keep a response, as long as there is room."""
        made = Stored(body, messages, len(json.dumps(body)) + len(json.dumps(messages)))
        self._stored[body["id"]] = made
        self._size += made.size
        while self._size > _CHARACTERS or len(self._stored) > _RESPONSES:
            self._size -= self._stored.popitem(last=False)[1].size

    def get(self, name: str, param: str | None = None) -> Stored:
        """One by its id. Raises ApiError where it is not here any more."""
        if name not in self._stored:
            said = f"there is no response {name[:80]!r}, or no longer"
            raise ApiError(404, said, param=param, code="previous_response_not_found" if param else None)
        self._stored.move_to_end(name)
        return self._stored[name]

    def remove(self, name: str) -> None:
        """Forget one. Raises ApiError as `get`."""
        self._size -= self.get(name).size
        del self._stored[name]

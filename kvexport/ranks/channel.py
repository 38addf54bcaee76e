"""The messages between rank 0 and another rank: a name, plain values and arrays, over a pair of sockets.

A process that ends in any way closes its end, and the other process detects that at once.
"""

from __future__ import annotations

import json
import math
import queue
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<I")  # the bytes of the header, which is JSON


@dataclass(frozen=True)
class Message:
    """A message between ranks.

    Attributes:
        name: The name of the call or of the answer.
        values: Plain values, as JSON can represent them.
        arrays: Arrays by name.
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the message in the form in which it is sent."""
        arrays = [(name, x.dtype.str, x.shape) for name, x in self.arrays.items()]
        header = json.dumps([self.name, dict(self.values), arrays]).encode()
        return b"".join([_LENGTH.pack(len(header)), header, *(x.tobytes() for x in self.arrays.values())])


class Channel:
    """One end of a connection; a thread reads messages, so that neither end has to wait to send."""

    def __init__(self, end: socket.socket, on_end: Callable[[Message | None], None]) -> None:
        """Start the reading thread.

        Args:
            end: The socket.
            on_end: A function that the reading thread calls with the last message when the other end is closed.
        """
        self._end = end
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        Thread(target=_read, args=(end, self._received, on_end), daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: If the other end is closed.
        """
        self._end.sendall(message.to_bytes())

    def receive(self) -> Message | None:
        """Return the next message; None if the other end is closed."""
        return self._received.get()

    def close(self) -> None:
        """Close this end, which the other end detects."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def _read(
    end: socket.socket, received: queue.SimpleQueue[Message | None], on_end: Callable[[Message | None], None]
) -> None:
    last = None
    with suppress(OSError, EOFError):
        while True:
            (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
            name, values, arrays = json.loads(bytes(_exactly(end, length)))
            contents = {}
            for key, kind, shape in arrays:
                dtype = np.dtype(kind)
                contents[key] = np.frombuffer(_exactly(end, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
            last = Message(name, values, contents)
            received.put(last)
    on_end(last)
    received.put(None)


def _exactly(end: socket.socket, count: int) -> bytearray:
    """Return the next `count` bytes.

    Raises:
        EOFError: If the other end is closed before.
    """
    data = bytearray(count)
    view = memoryview(data)
    while view.nbytes:
        count = end.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]
    return data

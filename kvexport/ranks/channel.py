"""The channel between rank 0 and another tensor-parallel rank: messages with plain values and arrays over sockets.

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
    """A message between two tensor-parallel ranks: a call or its answer.

    Attributes:
        name: The name of the call or of the answer.
        values: Plain values, as JSON can represent them.
        arrays: Arrays by name.
    """

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the message serialized as bytes, for the socket."""
        arrays = [(name, x.dtype.str, x.shape) for name, x in self.arrays.items()]
        header = json.dumps([self.name, dict(self.values), arrays]).encode()
        return b"".join([_LENGTH.pack(len(header)), header, *(x.tobytes() for x in self.arrays.values())])


class Channel:
    """One end of the connection between two ranks; a thread reads messages, so that neither end has to wait to send."""

    def __init__(self, end: socket.socket, on_end: Callable[[Message | None], None]) -> None:
        """Start the thread that reads messages of the other rank.

        Args:
            end: The socket.
            on_end: A function that the reading thread calls with the last message when the other end is closed.
        """
        self._end = end
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        Thread(target=_read, args=(end, self._received, on_end), daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message to the other rank.

        Raises:
            OSError: If the other end is closed.
        """
        self._end.sendall(message.to_bytes())

    def receive(self) -> Message | None:
        """Return the next message of the other tensor-parallel rank; None if it has closed the connection."""
        return self._received.get()

    def close(self) -> None:
        """Close this end of the connection, which the other rank detects."""
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
    """Read exactly `count` bytes from a socket.

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

"""Messages between rank 0 and another rank: a name, plain values and arrays, over a pair of sockets.

A process that ends, however it does, closes its end, and the other one reads that at once.
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

_LENGTH = struct.Struct("<I")  # of the header, which is JSON


@dataclass(frozen=True)
class Message:
    """values: as JSON holds them."""

    name: str
    values: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As it is sent."""
        arrays = [(name, x.dtype.str, x.shape) for name, x in self.arrays.items()]
        header = json.dumps([self.name, dict(self.values), arrays]).encode()
        return b"".join([_LENGTH.pack(len(header)), header, *(x.tobytes() for x in self.arrays.values())])


class Channel:
    """One end. A thread of its own reads, so that neither end waits to send. on_end: called by that thread, with the
    last message, when the other end is closed."""

    def __init__(self, end: socket.socket, on_end: Callable[[Message | None], None]) -> None:
        self._end = end
        self._received: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        Thread(target=_read, args=(end, self._received, on_end), daemon=True).start()

    def send(self, message: Message) -> None:
        """Raises OSError where the other end is closed."""
        self._end.sendall(message.to_bytes())

    def receive(self) -> Message | None:
        """The next message; None where there will be no more."""
        return self._received.get()

    def close(self) -> None:
        """The other end reads that there will be no more."""
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
            held = {}
            for key, kind, shape in arrays:
                dtype = np.dtype(kind)
                held[key] = np.frombuffer(_exactly(end, math.prod(shape) * dtype.itemsize), dtype).reshape(shape)
            last = Message(name, values, held)
            received.put(last)
    on_end(last)
    received.put(None)


def _exactly(end: socket.socket, count: int) -> bytearray:
    """The next bytes. Raises EOFError where the other end is closed before."""
    data = bytearray(count)
    view = memoryview(data)
    while view.nbytes:
        taken = end.recv_into(view)
        if not taken:
            raise EOFError
        view = view[taken:]
    return data

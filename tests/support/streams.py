"""Clients that read a stream byte by byte, stop reading, or go away."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit


class RawClient:
    """A connection of its own that has sent a request and reads no more than it is told to."""

    def __init__(self, url: str, path: str, body: Any, receive_buffer: int = 0) -> None:
        address = urlsplit(url)
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(60)
        self.socket.connect((address.hostname, address.port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def read_until(self, text: bytes) -> bytes:
        """What came, until `text` was in it or the other end closed."""
        seen = b""
        while text not in seen and (chunk := self.socket.recv(4096)):
            seen += chunk
        return seen

    def close(self) -> None:
        self.socket.close()

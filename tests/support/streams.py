"""HTTP clients that read a stream byte by byte, stop reading, or close the connection."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit


class RawClient:
    """A client that sends one request and reads the answer only when told to."""

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
        """Read until the answer contains `text` or the server closes the connection, and return everything read."""
        seen = b""
        while text not in seen and (chunk := self.socket.recv(4096)):
            seen += chunk
        return seen

    def close(self) -> None:
        self.socket.close()

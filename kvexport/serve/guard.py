"""Access control of the HTTP server: API keys, and for servers without keys the allowed host names and web origins."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvexport.serve.errors import ApiError
from kvexport.serve.settings import ServeSettings

OPEN = ("/health", "/ready")  # answers to these paths show nothing of any client
_LOCAL = ("localhost", "127.0.0.1", "::1")


class Guard:
    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self.app = app
        self._keys = settings.api_keys
        self._hosts = {*_LOCAL, *(host.lower() for host in settings.hosts)}
        self._origins = set(origins(settings))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)):
            response = JSONResponse(error.body(scope["path"]), error.status, headers=error.headers)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            # With both headers, a proxy and this server may disagree on where the request ends.
            error = ApiError(400, "send Content-Length or Transfer-Encoding, not both", code="invalid_request")
            error.headers["Connection"] = "close"
            return error
        host = headers.get("host", "")
        # A foreign web page can let its own host name resolve to this machine, so that the browser sees one origin.
        if not self._keys and _name(host) not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            message = f"this server has no API key and answers to {names}, not to {host[:80]!r}"
            return ApiError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        if origin and not {"*", origin.lower()} & self._origins and _netloc(origin) != host.lower():
            return ApiError(403, f"pages of {origin[:80]} may not call this server", code="origin_not_allowed")
        if self._keys and scope["path"] not in OPEN and not self._has_key(headers):
            error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            return error
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        return _matches([key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")], self._keys)


def origins(settings: ServeSettings) -> list[str]:
    """Return the origins of web pages that may call the server, as browsers write them; "*" is any origin."""
    return [origin.rstrip("/").lower() for origin in settings.origins]


def _matches(candidates: Sequence[str], keys: Sequence[str]) -> bool:
    matches = False
    for key in keys:
        for one in candidates:
            matches |= hmac.compare_digest(one.encode("latin-1"), key.encode())
    return matches


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""

"""The web page at / for chatting with the model: one HTML file that loads nothing else and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from kvexport.serve.service import Service


async def page(_: Service, __: Request) -> Response:
    return Response(text(), media_type="text/html", headers=headers())


@cache
def text() -> str:
    return (resources.files("kvexport.serve") / "page.html").read_text(encoding="utf-8")


@cache
def headers() -> dict[str, str]:
    """Return the HTTP security headers of the server's chat page.

    The Content-Security-Policy allows the page's own script and style by their digests, and requests to its own server.
    """
    policy = {
        "default-src": "'none'",
        "script-src": _digests("script"),
        "style-src": _digests("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _digests(tag: str) -> str:
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", text(), re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in blocks)

"""Reading of HTTP request bodies, with limits of size and time."""

from __future__ import annotations

import anyio
from starlette.requests import ClientDisconnect, Request

from kvexport.serve.errors import ApiError
from kvexport.serve.streams import ClientGone

_SECONDS = 60  # the time that a client has to send the whole body of a request


async def read_bytes(request: Request, limit: int) -> bytes:
    chunks, size = [], 0
    try:
        with anyio.fail_after(_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise ApiError(413, f"the body is longer than {limit} bytes", code="body_too_long")
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_SECONDS} seconds") from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)

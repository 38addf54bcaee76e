"""The answers of an engine to requests that run together to their ends."""

from kvexport.engine.engine import Engine
from kvexport.engine.request import Request
from kvexport.state.snapshot import Snapshot


def answers(engine: Engine, *requests: Request) -> list[list[int]]:
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    assert all(request.error is None for request in requests)
    return [[token.id for token in request.tokens] for request in requests]


def stopped(engine: Engine, request: Request) -> Snapshot:
    """Cancel a request that has `keep` set, and return its snapshot."""
    assert engine.cancel(request.id) and request.snapshot is not None
    return request.snapshot

"""Tests that malformed requests never break the server."""

import logging
from pathlib import Path

from tests.support.http_server import running
from tests.support.json_model import json_engine
from tests.support.request_fuzz import Errors, mutations


def test_no_request_breaks_the_server(tiny_artifact: Path) -> None:
    errors = Errors()
    logging.getLogger().addHandler(errors)
    try:
        with running(json_engine(tiny_artifact)) as server:
            seen = mutations(server, 300, seed=7)
            assert server.service.worker.pending == 0
    finally:
        logging.getLogger().removeHandler(errors)
    assert errors.messages == []
    assert seen["200"] > 30 and seen["400"] > 30

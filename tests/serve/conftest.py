"""A server and its client that the tests of a module share."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from kvexport.engine.engine import Engine
from tests.support.http_server import Running, engine_of, running


@pytest.fixture(scope="session")
def engine(tiny_artifact: Path) -> Engine:
    return engine_of(tiny_artifact)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client

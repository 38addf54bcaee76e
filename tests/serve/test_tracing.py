"""Tests of spans of requests, recorded by OpenTelemetry's own SDK."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvexport.engine.engine import Engine
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.language.sampling import Sampler
from kvexport.serve import tracing
from kvexport.serve.tracing import Tracing
from tests.support.http_server import Running, running, wait_until

COMPLETE = "/v1/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", *tracing._ENDPOINTS):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def server(engine: Engine, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "start", lambda model: Tracing(model, provider))
    with running(engine) as server:
        yield server


def spans(exporter: InMemorySpanExporter, count: int) -> list[Any]:
    wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    finished = exporter.get_finished_spans()
    assert len(finished) == count
    return sorted(finished, key=lambda span: (span.start_time, span.name != "request"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_parts(server: Running, exporter: InMemorySpanExporter, stream: bool) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    assert server.ask(COMPLETE, body, headers=headers)[0] == 200
    whole, *parts = spans(exporter, 4)
    assert whole.name == "request" and [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert f"{whole.context.trace_id:032x}" == TRACE and f"{whole.parent.span_id:016x}" == SPAN
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    edges = [parts[0].start_time, *(part.end_time for part in parts)]
    assert [whole.start_time, *(part.start_time for part in parts[1:]), whole.end_time] == [edges[0], *edges[1:]]
    assert edges == sorted(edges) and edges[-1] > edges[0]
    attributes = dict(whole.attributes)
    assert attributes["gen_ai.request.model"] == "tiny" and attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.usage.input_tokens"] > 0 and list(attributes["gen_ai.response.finish_reasons"]) == [
        "length"
    ]
    assert "hello" not in str(attributes)


def test_every_answer_has_a_span_and_failures_are_marked(
    server: Running, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.ask(COMPLETE, {"prompt": "hello", "max_tokens": 2, "n": 2})[0] == 200
    requests = [span for span in spans(exporter, 8) if span.name == "request"]
    assert [span.parent for span in requests] == [None, None] and all(span.status.is_ok for span in requests)
    exporter.clear()

    def fails(*_: Any) -> int:
        raise UsageError("no such token", "another")

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "next", fails)
        assert server.ask(COMPLETE, {"prompt": "hello", "max_tokens": 2})[0] == 400
    whole = spans(exporter, 3)[0]
    assert not whole.status.is_ok and whole.status.description == "UsageError"


def test_tracing_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.start("m") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert tracing.start("m") is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    provider = tracing.start("m")
    assert provider is not None and provider._provider.resource.attributes["service.name"] == "kvexport"
    provider._provider.shutdown()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "ours")
    provider = tracing.start("m")
    assert provider is not None and provider._provider.resource.attributes["service.name"] == "ours"
    provider._provider.shutdown()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.start("m") is None


def test_impossible_settings_are_refused_before_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(UsageError, match="zipkin"):
        tracing.start("m")
    monkeypatch.delenv("OTEL_TRACES_EXPORTER")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    monkeypatch.setattr(tracing, "is_there", lambda module: False)
    with pytest.raises(EnvironmentProblem, match="not installed") as error:
        tracing.start("m")
    assert "pip install opentelemetry-sdk" in error.value.fix


def test_an_installed_tracer_provider_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import opentelemetry.trace

    provider = TracerProvider()
    monkeypatch.setattr(opentelemetry.trace, "get_tracer_provider", lambda: provider)
    own_provider = tracing.start("m")
    assert own_provider is not None and own_provider._provider is provider

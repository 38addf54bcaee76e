"""OpenTelemetry spans of requests: their time in the queue, in prefill and in decode.

Tracing is on if OTEL_TRACES_EXPORTER (`otlp` or `console`) or OTEL_EXPORTER_OTLP_ENDPOINT is set, or if the process has
a tracer provider already (`opentelemetry-instrument`). A request's span is a child of the span in the client's
`traceparent` header.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from kvexport.engine.request import Request
from kvexport.errors import EnvironmentProblem, UsageError
from kvexport.packages import is_there
from kvexport.version import __version__

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTERS = {
    "otlp": ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "OTLPSpanExporter"),
    "console": ("opentelemetry.sdk.trace.export", "ConsoleSpanExporter"),
}
_INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
_parent: ContextVar[Any] = ContextVar("kvexport_trace_parent", default=None)


class Times(NamedTuple):
    """The times at which an engine request changed its state, in seconds of time.perf_counter().

    A time is 0 if the request did not reach the state.
    """

    added: float  # when it was queued
    begun: float  # when it got its lane (row of the batch)
    first: float  # when it got its first token
    ended: float  # when it finished


class Tracing:
    """The OpenTelemetry tracing of one server's requests."""

    def __init__(self, model: str, provider: Any) -> None:
        self._api = importlib.import_module("opentelemetry.trace")
        self._model, self._provider = model, provider
        self._tracer = provider.get_tracer("kvexport", __version__)

    def enter(self, headers: Mapping[str, str]) -> None:
        """Read the parent span from the headers of the HTTP request that the current task answers."""
        _parent.set(importlib.import_module("opentelemetry.propagate").extract(dict(headers)))

    def parent(self) -> Any:
        return _parent.get()

    def finished(self, request: Request, times: Times, parent: Any) -> None:
        offset = time.time_ns() - int(time.perf_counter() * 1e9)

        def at(seconds: float) -> int:
            return offset + int(seconds * 1e9)

        attributes = {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": len(request.ids),
            "gen_ai.usage.output_tokens": len(request.tokens),
            "gen_ai.response.finish_reasons": [request.finish_reason or ""],
            "kvexport.cached_tokens": request.cached_tokens,
        }
        kind = self._api.SpanKind.SERVER
        span = self._tracer.start_span("request", parent, kind, attributes, start_time=at(times.added))
        inside = self._api.set_span_in_context(span)
        ends = [("queue", times.added), ("prefill", times.begun), ("decode", times.first), ("", times.ended)]
        known = [(name, start) for name, start in ends if start]
        for (name, start), (_, end) in itertools.pairwise(known):
            self._tracer.start_span(name, inside, start_time=at(start)).end(at(end))
        if request.error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(request.error).__name__))
        span.end(at(times.ended))

    def close(self) -> None:
        """Export the spans that are still buffered, before the server ends."""
        if hasattr(self._provider, "force_flush"):
            self._provider.force_flush()


def start(model: str) -> Tracing | None:
    """Set up OpenTelemetry tracing as the environment variables configure it; return None if they enable none."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if is_there("opentelemetry.trace"):
        provider = importlib.import_module("opentelemetry.trace").get_tracer_provider()
        if type(provider).__name__ != "ProxyTracerProvider":  # OpenTelemetry's placeholder for none
            return Tracing(model, provider)
    exporter_name = os.environ.get("OTEL_TRACES_EXPORTER") or (
        "otlp" if any(map(os.environ.get, _ENDPOINTS)) else "none"
    )
    if exporter_name == "none":
        return None
    if exporter_name not in _EXPORTERS:
        raise UsageError(f"OTEL_TRACES_EXPORTER is {exporter_name[:40]!r}", f"one of {', '.join(_EXPORTERS)}, none")
    module, name = _EXPORTERS[exporter_name]
    if not (is_there("opentelemetry.sdk.trace") and is_there(module)):
        raise EnvironmentProblem(
            f"OTEL_TRACES_EXPORTER={exporter_name} needs OpenTelemetry, which is not installed", _INSTALL
        )
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    exporter = getattr(importlib.import_module(module), name)()
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = importlib.import_module("opentelemetry.sdk.resources").Resource.create(
        {} if named else {"service.name": "kvexport"}
    )
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(importlib.import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
    return Tracing(model, provider)

"""Spans of requests by OpenTelemetry: where it waits, how long its prompt was read and its answer made.

Off unless the standard environment variables ask for it: OTEL_TRACES_EXPORTER (`otlp` or `console`), or
OTEL_EXPORTER_OTLP_ENDPOINT; or unless the process has a tracer provider already (`opentelemetry-instrument`). A span
follows on that of the client's `traceparent` header.
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
    """Of one request, by time.perf_counter(); 0 where it did not come so far. begun: it got its lane. first: its first
    token."""

    added: float
    begun: float
    first: float
    ended: float


class Tracing:
    """Of one server. provider: a tracer provider of OpenTelemetry's."""

    def __init__(self, model: str, provider: Any) -> None:
        self._api = importlib.import_module("opentelemetry.trace")
        self._model, self._provider = model, provider
        self._tracer = provider.get_tracer("kvexport", __version__)

    def heard(self, headers: Mapping[str, str]) -> None:
        """What is answered now, in this task, is a request with these headers."""
        _parent.set(importlib.import_module("opentelemetry.propagate").extract(dict(headers)))

    def parent(self) -> Any:
        """What spans of the request that is answered now, in this task, follow on."""
        return _parent.get()

    def finished(self, request: Request, times: Times, parent: Any) -> None:
        """The spans of a request."""
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
        """Give away what has not been exported yet."""
        if hasattr(self._provider, "force_flush"):
            self._provider.force_flush()


def start(model: str) -> Tracing | None:
    """As the environment asks for it; None where it does not. Raises UsageError for an exporter that is not known,
    EnvironmentProblem where OpenTelemetry is asked for and not installed."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if is_there("opentelemetry.trace"):
        there = importlib.import_module("opentelemetry.trace").get_tracer_provider()
        if type(there).__name__ != "ProxyTracerProvider":  # which stands for none
            return Tracing(model, there)
    asked = os.environ.get("OTEL_TRACES_EXPORTER") or ("otlp" if any(map(os.environ.get, _ENDPOINTS)) else "none")
    if asked == "none":
        return None
    if asked not in _EXPORTERS:
        raise UsageError(f"OTEL_TRACES_EXPORTER is {asked[:40]!r}", f"one of {', '.join(_EXPORTERS)}, none")
    module, name = _EXPORTERS[asked]
    if not (is_there("opentelemetry.sdk.trace") and is_there(module)):
        raise EnvironmentProblem(f"OTEL_TRACES_EXPORTER={asked} needs OpenTelemetry, which is not installed", _INSTALL)
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    exporter = getattr(importlib.import_module(module), name)()
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = importlib.import_module("opentelemetry.sdk.resources").Resource.create(
        {} if named else {"service.name": "kvexport"}
    )
    provider = sdk.TracerProvider(resource=resource)
    provider.add_span_processor(importlib.import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
    return Tracing(model, provider)

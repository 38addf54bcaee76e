"""The server's Prometheus metrics at /metrics, named `vllm:...` if vLLM's dashboards read them, else `kvexport:...`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvexport.engine.request import Request

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)


class Metrics:
    """The Prometheus metrics of one server.

    The engine's thread writes counters and histograms. A gauge calls its function when /metrics is read.
    """

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        counter, seconds, tokens = self._counter, self._histogram(_SECONDS), self._histogram(_TOKENS)
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = counter("vllm:generation_tokens", "Tokens generated.")
        self._succeeded = Counter(
            "vllm:request_success",
            "Requests that finished, by the reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._first = seconds("vllm:time_to_first_token_seconds", "From the arrival to the first token.")
        self._between = seconds("vllm:inter_token_latency_seconds", "Between two tokens of a request.")
        self._whole = seconds("vllm:e2e_request_latency_seconds", "From the arrival to the last token.")
        self._prompt_sizes = tokens("vllm:request_prompt_tokens", "Tokens of a request's prompt.")
        self._generated_sizes = tokens("vllm:request_generation_tokens", "Tokens of a request's answer.")

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        Gauge(name, text, ("model_name",), registry=self.registry).labels(self._model).set_function(value)

    def counter(self, name: str, text: str, value: Callable[[], float]) -> None:
        self.registry.register(_Counted(name, text, self._model, value))

    def added(self, request: Request) -> None:
        self._prompt.inc(len(request.ids))
        self._prompt_sizes.observe(len(request.ids))

    def tokens(self, count: int, seconds: float, *, first: bool) -> None:
        """Record `count` new tokens, `seconds` after the previous tokens (`first`: after the request's arrival)."""
        self._generated.inc(count)
        if first:
            self._first.observe(seconds)
        else:
            for _ in range(count):
                self._between.observe(seconds / count)

    def finished(self, request: Request, seconds: float) -> None:
        self._whole.observe(seconds)
        self._generated_sizes.observe(len(request.tokens))
        self._succeeded.labels(self._model, request.finish_reason or "").inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ("model_name",), registry=self.registry).labels(self._model)

    def _histogram(self, buckets: tuple[float, ...]) -> Callable[[str, str], Histogram]:
        return lambda name, text: Histogram(
            name, text, ("model_name",), registry=self.registry, buckets=buckets
        ).labels(self._model)


class _Counted(Collector):
    def __init__(self, name: str, text: str, model: str, value: Callable[[], float]) -> None:
        self._name, self._text, self._model, self._value = name, text, model, value

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=("model_name",))
        family.add_metric((self._model,), self._value())
        yield family

"""The figures of a server under load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvexport.bench.figures import COLUMNS, cells, cumulated, percentiles
from kvexport.bench.load import Answer
from kvexport.bench.workload import Workload
from kvexport.report.sections import KeyValues, Paragraph, Plot, Section, Series, Table


@dataclass(frozen=True)
class Objective:
    """What a request must keep to count as good. Seconds: to the first token, and of a token behind it on average."""

    ttft: float = 1.0
    per_token: float = 0.1

    def holds(self, answer: Answer) -> bool:
        """Whether an answer, whole, kept it."""
        return not answer.error and answer.ttft <= self.ttft and answer.per_token <= self.per_token


@dataclass
class Result:
    """A run. answers: of every request that was sent."""

    url: str
    model: str
    workload: Workload
    objective: Objective
    seconds: float
    answers: Sequence[Answer]

    @property
    def whole(self) -> list[Answer]:
        """Those without an error."""
        return [answer for answer in self.answers if not answer.error]

    def to_json(self) -> dict[str, Any]:
        """Figures, and every request's own."""
        whole, good = self.whole, sum(map(self.objective.holds, self.answers))
        seconds = max(self.seconds, 1e-9)
        return {
            "url": self.url,
            "model": self.model,
            "workload": asdict(self.workload),
            "objective": asdict(self.objective),
            "seconds": round(self.seconds, 3),
            "requests": len(self.answers),
            "not_sent": self.workload.conversations * self.workload.turns - len(self.answers),
            "failed": len(self.answers) - len(whole),
            "errors": Counter(answer.error for answer in self.answers if answer.error),
            "requests_per_second": round(len(whole) / seconds, 3),
            "output_tokens_per_second": round(sum(answer.tokens for answer in whole) / seconds, 1),
            "prompt_tokens_per_second": round(sum(answer.prompt_tokens for answer in whole) / seconds, 1),
            "good_requests_per_second": round(good / seconds, 3),
            "good_share": round(good / max(len(self.answers), 1), 4),
            "ttft": percentiles([answer.ttft for answer in whole]),
            "inter_token_latency": percentiles([gap for answer in whole for gap in answer.gaps]),
            "per_token": percentiles([answer.per_token for answer in whole if answer.tokens > 1]),
            "end_to_end": percentiles([answer.end - answer.sent for answer in whole]),
            "each": [
                {
                    "conversation": answer.conversation,
                    "turn": answer.turn,
                    "sent": round(answer.sent, 4),
                    "ttft": round(answer.ttft, 5) if answer.pieces else None,
                    "seconds": round(answer.end - answer.sent, 5),
                    "prompt_tokens": answer.prompt_tokens,
                    "cached_tokens": answer.cached_tokens,
                    "tokens": answer.tokens,
                    "error": answer.error,
                }
                for answer in self.answers
            ],
        }


_TIMES = {
    "ttft": "time to first token",
    "inter_token_latency": "inter-token latency",
    "per_token": "time per token, of a request",
    "end_to_end": "whole answer",
}


def sections(result: Result) -> list[Section]:
    """Of a report."""
    data, workload = result.to_json(), result.workload
    names = ("requests", "failed", "not_sent", "seconds", "requests_per_second", "output_tokens_per_second")
    facts = {"server": result.url, "model": result.model, **{name.replace("_", " "): data[name] for name in names}}
    goal = f"first token within {result.objective.ttft:g} s, {result.objective.per_token * 1e3:g} ms a token"
    facts |= {f"goodput, requests per second ({goal})": data["good_requests_per_second"]}
    facts |= {"share of requests that kept it": data["good_share"]}
    found: list[Section] = [
        KeyValues("Server under load", facts),
        Table("Times", ["", *COLUMNS], [[name, *cells(data[key])] for key, name in _TIMES.items()]),
    ]
    if data["errors"]:
        found.append(Table("Errors", ["error", "requests"], sorted(data["errors"].items())))
    whole = result.whole
    if workload.turns > 1:
        turns = [[answer for answer in whole if answer.turn == turn] for turn in range(workload.turns)]
        rows = [
            [turn + 1, len(of), _mean([a.prompt_tokens for a in of]), _mean([a.cached_tokens for a in of]),
             *cells(percentiles([a.ttft for a in of]))]
            for turn, of in enumerate(turns)
        ]  # fmt: skip
        columns = ["turn", "answers", "prompt tokens", "of them cached", *COLUMNS]
        found.append(Table("Time to first token by turn", columns, rows))
    if whole:
        for key, values in (
            ("ttft", [answer.ttft for answer in whole]),
            ("inter_token_latency", [gap for answer in whole for gap in answer.gaps]),
        ):
            if values:
                x, y = cumulated(values)
                line = Series(_TIMES[key], x, y)
                found.append(Plot(f"{_TIMES[key]}: share of at most", "milliseconds", "share", [line]))
    else:
        found.append(Paragraph("No request was answered."))
    return found


def _mean(values: Sequence[int]) -> float | None:
    return round(sum(values) / len(values), 1) if values else None

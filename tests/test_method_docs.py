"""docs/methods.md says of every method what its class says."""

from __future__ import annotations

import re
from pathlib import Path

from kvexport.methods import all_methods
from kvexport.methods.base import Method, Statistic

DOCS = (Path(__file__).parent.parent / "docs" / "methods.md").read_text(encoding="utf-8")
KINDS = {"log_ema": "ln of the average exp(logit)", "probability": "sum of probabilities", "none": "none"}


def score(statistic: Statistic) -> str:
    words = [KINDS[statistic.kind]]
    words += [f"decay {statistic.decay:g}"] if statistic.decay != 1.0 else []
    words += [f"last {statistic.window} queries"] if statistic.window else []
    words += [f"newest times {statistic.recency_weight:g}"] if statistic.recency_weight != 1.0 else []
    return ", ".join(words)


def row(method: Method) -> str:
    alpha = method.vote_exponent
    bias = {0.0: "0", 1.0: "ln votes"}.get(alpha, f"{alpha:g} ln votes")
    return " | ".join(
        [
            f"| `{method.name}`",
            method.summary,
            "; ".join(score(s) for s in method.statistics),
            bias,
            method.allocation if method.compresses else "none",
            f"{method.source} |",
        ]
    )


def test_the_table_is_that_of_the_classes() -> None:
    rows = [row(method()) for method in all_methods().values()]
    found = [line for line in DOCS.splitlines() if line.startswith("| `")]
    assert found == rows, "docs/methods.md wants this table:\n" + "\n".join(rows)


def test_every_method_that_compresses_has_its_rule_and_every_parameter_its_name() -> None:
    sections = dict(re.findall(r"^### (\w+)$(.*?)(?=^##|\Z)", DOCS, re.MULTILINE | re.DOTALL))
    assert set(sections) == {name for name, method in all_methods().items() if method.compresses}
    for name, method in all_methods().items():
        shared = {"selector", "share_pairs"}
        missing = [p for p in method.model_fields if p not in shared and f"`{p}" not in sections.get(name, "")]
        assert not missing, f"{name}: {', '.join(missing)}"
    assert all(f"`{p}" in DOCS for p in ("selector", "share_pairs"))

"""Tests of the Grafana dashboard: it keeps the rules of Grafana, and queries metrics that the server exports."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.grafana import problems
from tests.support.http_server import Running

DASHBOARD = Path(__file__).parent.parent.parent / "docker" / "grafana" / "dashboard.json"
METRIC = re.compile(r"\b(?:vllm|kvexport):\w+")
DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "tasks" / "serve.md"


def queries(board: dict[str, Any]) -> list[str]:
    """Return the queries of all panels and of all variables."""
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    return [*panels, *(variable["query"] for variable in board["templating"]["list"])]


def test_the_dashboard_queries_metrics_of_the_server_alone(server: Running) -> None:
    import urllib.request

    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        exported = set(METRIC.findall(response.read().decode()))
    queried = {name for query in queries(json.loads(DASHBOARD.read_text())) for name in METRIC.findall(query)}
    assert queried <= exported
    assert "vllm:time_to_first_token_seconds_bucket" in queried


def test_the_dashboard_shows_every_metric_that_the_documentation_names() -> None:
    text = DOCUMENTED.read_text(encoding="utf-8").split("## Metrics")[1].split("## Traces")[0]
    shown = " ".join(queries(json.loads(DASHBOARD.read_text())))
    assert [name for name in METRIC.findall(text) if name not in shown] == []


def test_the_dashboard_keeps_the_rules_of_grafana() -> None:
    assert problems(json.loads(DASHBOARD.read_text())) == []


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("panels", 1, "id"), 1, "id of panels: 1 occurs 2 times"),
        (("panels", 0, "gridPos", "w"), 9, "Requests and Finished requests, by reason overlap"),
        (("panels", 2, "gridPos", "w"), 9, "Tokens a second ends beyond column 24"),
        (("panels", 0, "kind"), "graph", "$.panels[0]: Additional properties are not allowed ('kind' was unexpected)"),
        (("panels", 0, "targets", 1, "refId"), "A", "refId of Requests: A occurs 2 times"),
        (("panels", 0, "datasource", "uid"), "$source", "$source is no variable"),
        (("panels", 0, "fieldConfig", "defaults", "unit"), "tokens", "is not one of"),
        (("uid",), "kv export", "does not match"),
        (("templating", "list", 1, "datasource"), None, "is not valid under any of the given schemas"),
    ],
)
def test_a_broken_rule_of_grafana_is_found(path: tuple[Any, ...], value: Any, problem: str) -> None:
    board = json.loads(DASHBOARD.read_text())
    *outer, last = path
    place = board
    for key in outer:
        place = place[key]
    place[last] = value
    (found,) = problems(board)
    assert problem in found

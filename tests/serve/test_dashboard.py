"""Tests of the Grafana dashboard: every metric that it queries is one that the server exports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def test_the_panels_have_places_of_their_own_and_one_source() -> None:
    board = json.loads(DASHBOARD.read_text())
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert {panel["datasource"]["uid"] for panel in board["panels"]} == {"${datasource}"}

"""A real Prometheus with the shipped configuration reads a server: every query of the dashboard returns data."""

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvexport.engine.engine import Engine
from tests.serve.test_dashboard import DASHBOARD, queries
from tests.support.http_server import Running, running, wait_until

CONFIGURATION = Path(__file__).parent.parent.parent / "docker" / "prometheus.yml"
KEY = "secret"


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"not reached: there is no {name} (apt-get install prometheus)")
    return path


def configured(folder: Path, url: str, *, key: str = "") -> Path:
    """Write the shipped configuration for the server at `url`, which is read twice a second, and return its path."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    changes = {"127.0.0.1:8000": url.removeprefix("http://"), "scrape_interval: 10s": "scrape_interval: 500ms"}
    if key:
        changes["# authorization"] = "authorization"
        (folder / "kvexport.key").write_text(f"{key}\n")
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


@contextmanager
def prometheus(configuration: Path) -> Iterator[str]:
    """Run Prometheus for the duration of the `with` block, and yield its address."""
    folder = configuration.parent
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program("prometheus"), f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("wb") as log:
        child = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log, cwd=folder)
    try:
        yield f"http://{address}"
    finally:
        child.terminate()
        child.wait(60)


def asked(address: str, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus; nothing while Prometheus starts."""
    try:
        with urllib.request.urlopen(f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            return json.load(answer)["data"]
    except OSError as error:
        if getattr(error, "code", 503) != 503:
            raise
        return {"result": [], "activeTargets": []}


def without_data(address: str, expressions: list[str]) -> list[str]:
    answers = {one: asked(address, "query", query=one)["result"] for one in expressions}
    return [one for one, found in answers.items() if not found or any(x["value"][1] == "NaN" for x in found)]


def traffic(server: Running) -> None:
    """Ask for two answers that share a prompt longer than a chunk."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "anna lamp . boris guitar . " * 8, "max_tokens": 8, "ignore_eos": True}
    for _ in range(2):
        assert server.ask("/v1/completions", body, headers=headers)[0] == 200


def test_the_shipped_configuration_is_one_of_prometheus(tmp_path: Path) -> None:
    promtool = program("promtool")
    checked = subprocess.run([promtool, "check", "config", CONFIGURATION], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    keyed = configured(tmp_path, "http://127.0.0.1:1", key=KEY)
    checked = subprocess.run([promtool, "check", "config", keyed], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_every_query_of_the_dashboard_returns_data(engine: Engine, tmp_path: Path) -> None:
    expressions = [
        one.replace("$__rate_interval", "1m").replace("$model", ".*")
        for one in queries(json.loads(DASHBOARD.read_text()))
        if "(" in one and not one.startswith("label_values")
    ]
    assert len(expressions) > 20 and not re.search(r"\$", "".join(expressions))
    with running(engine, api_keys=(KEY,)) as server, prometheus(configured(tmp_path, server.url, key=KEY)) as address:
        wait_until(lambda: asked(address, "query", query="kvexport:lanes")["result"])
        # A rate takes two readings, and a counter of a reason that is new has none before its first request.
        traffic(server)
        wait_until(lambda: asked(address, "query", query="vllm:request_success_total > 0")["result"])
        traffic(server)
        wait_until(lambda: not without_data(address, expressions))
        (lanes,) = asked(address, "query", query="kvexport:lanes")["result"]
        assert float(lanes["value"][1]) == engine.max_batch
        assert lanes["metric"]["model_name"] == "tiny"


def test_without_its_key_prometheus_reads_nothing(engine: Engine, tmp_path: Path) -> None:
    with running(engine, api_keys=(KEY,)) as server, prometheus(configured(tmp_path, server.url)) as address:
        wait_until(lambda: any(one["lastError"] for one in asked(address, "targets")["activeTargets"]))
        (target,) = asked(address, "targets")["activeTargets"]
        assert (target["health"], target["lastError"]) == ("down", "server returned HTTP status 401 Unauthorized")

"""Tests of docker/kubernetes.yaml."""

from typing import Any

import typer
import yaml

from kvexport.commands.app import app
from kvexport.units import parse_bytes
from tests.support.paths import ROOT

OBJECTS: dict[str, Any] = {
    each["kind"]: each for each in yaml.safe_load_all((ROOT / "docker" / "kubernetes.yaml").read_text())
}
SPEC = OBJECTS["Deployment"]["spec"]
POD = SPEC["template"]["spec"]
CONTAINER = POD["containers"][0]


def server_of(words: list[str]) -> dict[str, Any]:
    """Return the values of the options of `kvexport serve`, as the command line reads them."""
    verb, *rest = words
    return typer.main.get_command(app).commands[verb].make_context(verb, rest).params  # type: ignore[attr-defined,no-any-return]


def test_the_servers_command_is_valid_and_fits_the_pod() -> None:
    assert all(isinstance(word, str) for word in CONTAINER["args"])
    values = server_of(CONTAINER["args"])
    assert (values["host"], values["port"]) == ("0.0.0.0", CONTAINER["ports"][0]["containerPort"])
    assert str(values["threads"]) == CONTAINER["resources"]["requests"]["cpu"]
    assert POD["terminationGracePeriodSeconds"] > values["drain"]
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert [mounts["artifact"]] == [values["source"]] and mounts["sessions"] == str(values["session_folder"].parent)
    assert mounts.keys() == {volume["name"] for volume in POD["volumes"]}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in POD["volumes"] if "persistentVolumeClaim" in v]
    claim = OBJECTS["PersistentVolumeClaim"]
    assert claims == ["kvexport-artifact", claim["metadata"]["name"]]
    storage = parse_bytes(claim["spec"]["resources"]["requests"]["storage"] + "B")
    assert storage > parse_bytes(values["session_disk"])


def test_probes_key_labels_and_ports_fit_together() -> None:
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    key = {"name": "kvexport-key", "key": "key"}
    assert CONTAINER["env"] == [{"name": "KVEXPORT_API_KEY", "valueFrom": {"secretKeyRef": key}}]
    labels = SPEC["template"]["metadata"]["labels"]
    assert SPEC["selector"]["matchLabels"] == labels == OBJECTS["Service"]["spec"]["selector"]
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] == CONTAINER["ports"][0]["name"] == "http"
    assert SPEC["replicas"] == 1 and SPEC["strategy"] == {"type": "Recreate"}
    assert CONTAINER["resources"]["limits"]["memory"] == CONTAINER["resources"]["requests"]["memory"]


def test_the_option_for_several_servers_is_one_of_the_command() -> None:
    assert server_of([*CONTAINER["args"], "--session-shared"])["session_shared"]

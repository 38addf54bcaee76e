"""Tests of the manifests of `kvexport deploy kubernetes`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.commands.app import app
from tests.support import command_line
from tests.support.paths import ROOT


def objects(artifact: Path, *options: object) -> dict[str, Any]:
    out = command_line.ok("deploy", "kubernetes", artifact, "--name", "tiny", *options)
    assert "&id" not in out
    return {each["kind"]: each for each in yaml.safe_load_all(out)}


def test_the_generated_server_command_is_valid(tiny_artifact: Path) -> None:
    manifests = objects(tiny_artifact, "--lanes", 2, "--cpus", 3, "--drain", 7, "--session-disk", "1GiB")
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    verb, *words = container["args"]
    values = typer.main.get_command(app).commands[verb].make_context(verb, words).params  # type: ignore[attr-defined]
    assert {name: values[name] for name in ("host", "port", "name", "lanes", "threads", "drain", "session_disk")} == {
        "host": "0.0.0.0",
        "port": container["ports"][0]["containerPort"],
        "name": ["tiny"],
        "lanes": 2,
        "threads": 3,
        "drain": 7,
        "session_disk": str(1 << 30),
    }
    assert pod["terminationGracePeriodSeconds"] > values["drain"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["artifact"] == values["source"] and mounts["sessions"] == str(values["session_folder"].parent)
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v]
    assert claims == ["tiny-artifact", manifests["PersistentVolumeClaim"]["metadata"]["name"]]


def test_probes_key_labels_and_ports_fit_together(tiny_artifact: Path) -> None:
    manifests = objects(tiny_artifact)
    spec = manifests["Deployment"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/health"}
    key = {"name": "tiny-key", "key": "key"}
    assert container["env"] == [{"name": "KVEXPORT_API_KEY", "valueFrom": {"secretKeyRef": key}}]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == manifests["Service"]["spec"]["selector"]
    assert manifests["Service"]["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"] == "http"
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}


def test_several_servers_share_the_volume_of_sessions(tiny_artifact: Path) -> None:
    manifests = objects(tiny_artifact, "--replicas", 3)
    spec = manifests["Deployment"]["spec"]
    assert spec["replicas"] == 3 and spec["strategy"] == {"type": "RollingUpdate"}
    assert manifests["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    verb, *words = spec["template"]["spec"]["containers"][0]["args"]
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    assert command.make_context(verb, words).params["session_shared"]
    assert "--session-shared" not in str(objects(tiny_artifact))


def test_values_for_helm_are_yaml_and_fit_together() -> None:
    text = (ROOT / "docs" / "tasks" / "deploy.md").read_text()
    ray, triton = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    for group in (ray["head"], ray["worker"]):
        assert {m["name"] for m in group["volumeMounts"]} == {volume["name"] for volume in group["volumes"]}
    command = re.search(r"`kvexport\s+(deploy ray [^`]*)`", text)  # the page breaks its lines anywhere
    assert command is not None
    words = command[1].split()[2:]
    context = typer.main.get_command(app).commands["deploy"].commands["ray"].make_context("ray", words)  # type: ignore[attr-defined]
    mounted = {mount["mountPath"] for mount in ray["worker"]["volumeMounts"]}
    assert {str(context.params["artifact"]), str(context.params["session_folder"])} == mounted
    assert triton["serverArgs"] == ["--model-repository=/models"]


def test_memory_is_the_sum_of_the_artifact_and_the_options(tiny_artifact: Path) -> None:
    manifest = load_manifest(tiny_artifact)

    def memory(*options: object) -> int:
        pod = objects(tiny_artifact, *options)["Deployment"]["spec"]["template"]["spec"]
        resources = pod["containers"][0]["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        return int(resources["limits"]["memory"].removesuffix("Mi")) << 20

    least = 2 * manifest.bytes + manifest.cache.bytes(4) + (512 << 20)
    assert 0 <= memory("--prefix-memory", "0", "--session-memory", "0") - least < 1 << 20
    assert memory("--prefix-memory", "3GiB") - memory("--prefix-memory", "1GiB") == 2 << 30


@pytest.mark.parametrize(
    ("settings", "gpus"),
    [
        ({"name": "onnxruntime", "device": "cpu"}, None),
        ({"name": "onnxruntime", "device": "cuda"}, 1),
        ({"name": "tensorrt"}, 1),
    ],
    ids=str,
)
def test_a_server_asks_for_the_gpus_of_its_artifact(
    tiny_artifact: Path, tmp_path: Path, settings: dict[str, Any], gpus: int | None
) -> None:
    artifact = tmp_path / "artifact"
    shutil.copytree(tiny_artifact, artifact)
    manifest = json.loads((artifact / "manifest.json").read_text())
    manifest["recipe"]["backend"] = settings
    (artifact / "manifest.json").unlink()
    write_manifest(artifact, {name: x for name, x in manifest.items() if name not in ("files", "manifest_sha256")})
    pod = objects(artifact)["Deployment"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") == gpus


def test_values_that_a_cluster_would_refuse_are_refused(tiny_artifact: Path) -> None:
    for options, message in (
        (("--name", "Tiny"), "no name that Kubernetes takes"),
        (("--claim", "a_b"), "--claim with"),
        (("--lanes", "5"), "built for 4"),
    ):
        assert message in command_line.failure(2, "deploy", "kubernetes", tiny_artifact, *options)

"""Kubernetes objects that run `kvexport serve`: a Deployment, its Service, and the volume claim of the sessions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvexport import backends
from kvexport.artifact.manifest import Manifest
from kvexport.artifact.reading import load_manifest
from kvexport.backends.adapters import largest_bytes
from kvexport.cache_planning import state_bytes
from kvexport.errors import UsageError
from kvexport.memory import ServerMemory

USER = 10001  # of docker/cpu.Dockerfile
PORT = 8000
MIB = 1 << 20
GPU = "nvidia.com/gpu"  # the resource of NVIDIA's device plugin for Kubernetes


@dataclass(frozen=True)
class Server:
    """Settings of a Kubernetes deployment of `kvexport serve`.

    Attributes:
        image: Image with `kvexport` as its entry point and the extra `serve`.
        name: Name of all objects in the cluster.
        claim: Name of the claim of the volume whose root is the artifact.
        cpus: CPU cores of a server.
        lanes: Lanes of a server; None is the artifact's `limits.max_batch`.
        drain: Seconds that running requests may still take after a server is told to end.
        prefix_memory: Memory for prefixes, in bytes.
        session_memory: Memory for sessions, in bytes.
        session_disk: Disk space for sessions, in bytes.
        replicas: Number of servers. Several servers share the folder of sessions.
    """

    image: str
    name: str
    claim: str
    cpus: int
    lanes: int | None
    drain: int
    prefix_memory: int
    session_memory: int
    session_disk: int
    replicas: int = 1


def memory(manifest: Manifest, server: Server) -> int:
    """Return the memory in bytes that one server of the Kubernetes deployment needs.

    All files of the artifact count as weights. Adapters count with the largest number and rank that the artifact
    allows.
    """
    state = state_bytes(manifest.recipe, manifest.cache, server.lanes or manifest.limits.max_batch)
    adapters = largest_bytes(manifest.recipe, manifest.adapters)
    return ServerMemory(manifest.bytes, state, server.prefix_memory, server.session_memory, adapters).total


def manifests(artifact: Path, server: Server) -> str:
    """Return the YAML of all Kubernetes objects that serve an artifact.

    Raises:
        UsageError: Kubernetes would refuse a name, or the artifact has fewer lanes than the server.
        ArtifactError: The artifact is damaged.
    """
    for option, name in (("--name", server.name), ("--claim", server.claim)):
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", name):
            raise UsageError(f"{name!r} is no name that Kubernetes takes", f"{option} with a-z, 0-9 and - alone")
    manifest = load_manifest(artifact)
    most = manifest.limits.max_batch
    if server.lanes is not None and server.lanes > most:
        raise UsageError(f"--lanes is {server.lanes}, the artifact was built for {most}", f"--lanes {most} or fewer")
    needed = _mib(memory(manifest, server))
    objects = [_claim(server), _deployment(server, needed, _gpus(manifest)), _service(server)]
    key = f"# kubectl create secret generic {server.name}-key --from-literal=key=KEY\n"
    return key + str(yaml.safe_dump_all(objects, sort_keys=False))


def _gpus(manifest: Manifest) -> int:
    """Return the GPUs of one server: one, or none if the artifact runs on the CPU."""
    backend = manifest.recipe.backend
    return 1 if backends.get(backend.name).needs_gpu(manifest.recipe) else 0


def _mib(amount: int) -> str:
    return f"{-(-amount // MIB)}Mi"


def _metadata(server: Server, suffix: str = "") -> dict[str, Any]:
    return {"name": server.name + suffix, "labels": {"app.kubernetes.io/name": server.name}}


def _claim(server: Server) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(server, "-sessions"),
        "spec": {
            "accessModes": ["ReadWriteOnce" if server.replicas == 1 else "ReadWriteMany"],
            # A session that is being written is there twice
            "resources": {"requests": {"storage": _mib(server.session_disk + server.session_memory)}},
        },
    }


def _deployment(server: Server, memory: str, gpus: int) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": server.name}
    pod = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        # Requests drain, then sessions are written
        "terminationGracePeriodSeconds": server.drain + 60,
        "containers": [_container(server, memory, gpus)],
        "volumes": [
            {"name": "artifact", "persistentVolumeClaim": {"claimName": server.claim, "readOnly": True}},
            {"name": "sessions", "persistentVolumeClaim": {"claimName": f"{server.name}-sessions"}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(server),
        "spec": {
            "replicas": server.replicas,
            # No two servers may have one folder of sessions, unless they share it
            "strategy": {"type": "Recreate" if server.replicas == 1 else "RollingUpdate"},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": dict(labels)}, "spec": pod},
        },
    }


def _container(server: Server, memory: str, gpus: int) -> dict[str, Any]:
    options = {
        "--host": "0.0.0.0",
        "--port": PORT,
        "--name": server.name,
        "--threads": server.cpus,
        "--drain": server.drain,
        "--prefix-memory": server.prefix_memory,
        "--session-memory": server.session_memory,
        "--session-folder": "/sessions/kept",
        "--session-disk": server.session_disk,
        **({} if server.lanes is None else {"--lanes": server.lanes}),
    }
    limits = {"memory": memory, **({GPU: gpus} if gpus else {})}  # Kubernetes requests as many GPUs as are the limit
    return {
        "name": "kvexport",
        "image": server.image,
        "args": [
            "serve",
            "/artifact",
            *(str(word) for option in options.items() for word in option),
            *(["--session-shared"] if server.replicas > 1 else []),
        ],
        "env": [
            {"name": "KVEXPORT_API_KEY", "valueFrom": {"secretKeyRef": {"name": f"{server.name}-key", "key": "key"}}}
        ],
        "ports": [{"name": "http", "containerPort": PORT}],
        # Until the model is loaded nothing is answered; digests of large weights take their time
        "startupProbe": {**_probe("/ready"), "periodSeconds": 5, "failureThreshold": 120},
        "readinessProbe": {**_probe("/ready"), "periodSeconds": 5},
        "livenessProbe": {**_probe("/health"), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {"requests": {"cpu": str(server.cpus), "memory": memory}, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "artifact", "mountPath": "/artifact", "readOnly": True},
            {"name": "sessions", "mountPath": "/sessions"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _probe(path: str) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": "http"}}


def _service(server: Server) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(server),
        "spec": {
            "selector": {"app.kubernetes.io/name": server.name},
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }

"""The command `kvexport inspect`: the content of an artifact, and whether its files are intact."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvexport.commands.options import ArtifactArgument, JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import ArtifactError
from kvexport.units import format_bytes

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest
    from kvexport.report import Section


def inspect(
    artifact: ArtifactArgument,
    as_json: JsonOption = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compute the SHA-256 of every file.")] = True,
) -> None:
    """Show the content of an artifact and whether its files are intact."""
    from kvexport.artifact.reading import load_manifest
    from kvexport.backends import all_backends

    manifest = load_manifest(artifact, verify=verify)
    graphs = {name: _read_graph(artifact, file) for name, file in manifest.graphs.files()}
    described = [backend.describe(artifact, manifest) for backend in all_backends()]
    data = {key: value for description in described for key, value in description.data.items()}
    of_backends = [section for description in described for section in description.sections]
    print_result(
        as_json,
        lambda: _data(artifact, manifest, graphs, data, verify),
        lambda: _sections(artifact, manifest, graphs, of_backends, verify),
    )


def _data(
    path: Path, manifest: Manifest, graphs: dict[str, dict[str, Any]], of_backends: dict[str, Any], verified: bool
) -> dict[str, Any]:
    layers = [
        {**entry, "bytes": layer.bytes()}
        for entry, layer in zip(manifest.cache.to_json(), manifest.cache.caches, strict=True)
    ]
    sizes = {"bytes_per_sequence": manifest.cache.bytes(1), "bytes": manifest.cache.bytes(manifest.limits.max_batch)}
    fields = manifest.to_json()
    kept = ("contract_version", "recipe", "model", "limits", "operators", "versions")
    return {
        "artifact": str(path),
        **{key: fields[key] for key in kept},
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        **of_backends,
        "cache": {**sizes, "layers": layers},
        "graphs": graphs,
        "engines": manifest.engines,
        "divergence": fields.get("divergence"),
        "plain_attention": manifest.plain_attention,
        "digests": "verified" if verified else "not verified",
    }


def _sections(
    path: Path, manifest: Manifest, graphs: dict[str, dict[str, Any]], of_backends: list[Section], verified: bool
) -> list[Section]:
    from kvexport.plan.memory import layer_table
    from kvexport.recipe.fields import shown_length
    from kvexport.report import KeyValues, Table

    recipe, model, batch = manifest.recipe, manifest.model, manifest.limits.max_batch
    parameters = ", ".join(f"{key}={value}" for key, value in recipe.cache.parameters.items())
    summary = {
        "recipe": f"{manifest.name or '-'}: {recipe.description or '-'}",
        "model": f"{model.type}, {model.layers} layers, vocabulary {model.vocabulary}, {recipe.shown_dtype}",
        "weights": "; ".join(f"{n} of {kind}" for kind, n in model.packed.items()) or recipe.model.dtype,
        "checkpoint": f"{recipe.model.path} (fingerprint {model.fingerprint})",
        "method": f"{recipe.cache.method}{f' ({parameters})' if parameters else ''}",
        **({"attention": manifest.plain_attention} if manifest.plain_attention else {}),
        **({} if manifest.divergence is None else {"measured at build": manifest.divergence.line}),
        "backend": _runs_on(manifest),
        "limits": ", ".join(f"{name} {shown_length(n)}" for name, n in asdict(manifest.limits).items()),
        "cache of 1 sequence": format_bytes(manifest.cache.bytes(1)),
        f"cache of {batch} sequences": format_bytes(manifest.cache.bytes(batch)),
        "files": f"{len(manifest.files)}, {format_bytes(manifest.bytes)}",
        "digests": "SHA-256 of every file verified" if verified else "NOT verified; names and sizes were",
        "contract version": manifest.contract_version,
    }
    files = [(name, format_bytes(entry.bytes), entry.sha256) for name, entry in sorted(manifest.files.items())]
    return [
        KeyValues(f"Artifact {path}", summary),
        layer_table(manifest.cache),
        Table("Graphs", ("file", "nodes", "operators"), [_graph_row(graph) for graph in graphs.values()]),
        *of_backends,
        Table("Files", ("file", "size", "SHA-256"), files),
        KeyValues("Built with", {name: version or "-" for name, version in manifest.versions.items()}),
    ]


def _runs_on(manifest: Manifest) -> str:
    """Return the recipe's backend and device, with the requirements that this machine lacks."""
    from kvexport.backends import get

    backend = get(manifest.recipe.backend.name)
    lacks = "; ".join(problem for problem, _ in backend.problems(manifest.recipe))
    runs_on = " ".join(filter(None, [backend.name, backend.device(manifest.recipe)]))
    return f"{runs_on}, which cannot run here: {lacks}" if lacks else runs_on


def _read_graph(path: Path, file: str) -> dict[str, Any]:
    """Count the nodes of an ONNX graph, by operator and in its ONNX functions; counts are None without `onnx`.

    A call of an ONNX function counts as one node of the graph.
    """
    try:
        import onnx
    except ImportError:
        return {"file": file, "nodes": None, "operators": None, "functions": None}
    try:
        model = onnx.load(str(path / file), load_external_data=False)
    except Exception as error:  # each implementation of protobuf has its own error class
        problem = f"{path / file} is no ONNX graph: {str(error)[:200]}"
        raise ArtifactError(problem, "build the artifact again: kvexport build") from error
    operators = Counter(_qualified(node.domain, node.op_type) for node in model.graph.node)
    functions = {_qualified(f.domain, f.name): len(f.node) for f in model.functions}
    return {
        "file": file,
        "nodes": operators.total(),
        "operators": dict(sorted(operators.items())),
        "functions": functions,
    }


def _graph_row(graph: dict[str, Any]) -> tuple[str, int | None, str]:
    operators = graph["operators"]
    if operators is None:
        return graph["file"], None, "unknown: the package onnx, which reads them, is not installed"
    own = [name for name in operators if name.startswith("kvexport.")]
    common = [name for name, _ in Counter(operators).most_common() if name not in own][:5]
    shown = [f"{operators[name]} {name}" for name in (*own, *common)]
    return graph["file"], graph["nodes"], ", ".join([*shown, *(["..."] if len(shown) < len(operators) else [])])


def _qualified(domain: str, name: str) -> str:
    return f"{domain}.{name}" if domain else name

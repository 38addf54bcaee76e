"""The command `kvexport inspect`: the content of an artifact, and whether its files are intact."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvexport.commands.options import ArtifactArgument, JsonOption
from kvexport.commands.output import print_result
from kvexport.errors import ArtifactError
from kvexport.units import format_bytes

if TYPE_CHECKING:
    from kvexport.artifact.manifest import Manifest
    from kvexport.backends.base import Description
    from kvexport.report.sections import KeyValues, Section


def inspect(
    artifact: ArtifactArgument,
    as_json: JsonOption = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compute the SHA-256 of every file.")] = True,
) -> None:
    """Show the content of an artifact and whether its files are intact."""
    inspection = inspect_artifact(artifact, verify=verify)
    print_result(as_json, inspection.to_json, inspection.sections)


@dataclass(frozen=True)
class Graph:
    """The node counts of one ONNX graph of an artifact.

    Attributes:
        operators: The number of nodes of each operator, without those in functions; None without the package `onnx`.
        functions: The number of nodes in each ONNX function of the graph; None without the package `onnx`.
    """

    name: str
    file: str
    operators: dict[str, int] | None
    functions: dict[str, int] | None

    @property
    def nodes(self) -> int | None:
        """The number of nodes of the ONNX graph; each call of an ONNX function counts as one."""
        return None if self.operators is None else sum(self.operators.values())


@dataclass(frozen=True)
class Inspection:
    """The result of `kvexport inspect`: a checked artifact and its description.

    Attributes:
        verified: Whether the SHA-256 of every file was checked, not only its name and size.
        described: The descriptions of the artifact by the backends (ONNX Runtime, TensorRT).
        runs_on: The recipe's backend and device, with the requirements that this machine lacks.
    """

    path: Path
    manifest: Manifest
    graphs: list[Graph]
    verified: bool
    described: list[Description]
    runs_on: str

    def to_json(self) -> dict[str, Any]:
        manifest = self.manifest
        batch = manifest.limits.max_batch
        graphs = {
            g.name: {"file": g.file, "nodes": g.nodes, "operators": g.operators, "functions": g.functions}
            for g in self.graphs
        }
        layers = [
            {**entry, "bytes": layer.bytes()}
            for entry, layer in zip(manifest.cache.to_json(), manifest.cache.caches, strict=True)
        ]
        cache = {"bytes_per_sequence": manifest.cache.bytes(1), "bytes": manifest.cache.bytes(batch), "layers": layers}
        fields = manifest.to_json()
        kept = ("contract_version", "recipe", "model", "limits", "operators", "versions")
        digests = "verified" if self.verified else "not verified"
        return {
            "artifact": str(self.path),
            **{key: fields[key] for key in kept},
            "files": {name: asdict(entry) for name, entry in manifest.files.items()},
            **{key: value for description in self.described for key, value in description.data.items()},
            "cache": cache,
            "graphs": graphs,
            "engines": manifest.engines,
            "divergence": fields.get("divergence"),
            "digests": digests,
        }

    def sections(self) -> list[Section]:
        from kvexport.plan.memory import layer_table
        from kvexport.report.sections import KeyValues, Table

        files = sorted(self.manifest.files.items())
        return [
            self._summary(),
            layer_table(self.manifest.cache),
            Table("Graphs", ("file", "nodes", "operators"), [_graph_row(graph) for graph in self.graphs]),
            *(section for description in self.described for section in description.sections),
            Table(
                "Files",
                ("file", "size", "SHA-256"),
                [(name, format_bytes(entry.bytes), entry.sha256) for name, entry in files],
            ),
            KeyValues("Built with", {name: version or "-" for name, version in self.manifest.versions.items()}),
        ]

    def _summary(self) -> KeyValues:
        from kvexport.recipe.fields import shown_length
        from kvexport.report.sections import KeyValues

        manifest = self.manifest
        recipe, model, batch = manifest.recipe, manifest.model, manifest.limits.max_batch
        parameters = ", ".join(f"{key}={value}" for key, value in recipe.cache.parameters.items())
        return KeyValues(
            f"Artifact {self.path}",
            {
                "recipe": f"{manifest.name or '-'}: {recipe.description or '-'}",
                "model": f"{model.type}, {model.layers} layers, vocabulary {model.vocabulary}, {recipe.shown_dtype}",
                "weights": "; ".join(f"{n} of {kind}" for kind, n in model.packed.items()) or recipe.model.dtype,
                "checkpoint": f"{recipe.model.path} (fingerprint {model.fingerprint})",
                "method": f"{recipe.cache.method}{f' ({parameters})' if parameters else ''}",
                **({} if manifest.divergence is None else {"measured at build": manifest.divergence.line}),
                "backend": self.runs_on,
                "limits": ", ".join(f"{name} {shown_length(n)}" for name, n in asdict(manifest.limits).items()),
                "cache of 1 sequence": format_bytes(manifest.cache.bytes(1)),
                f"cache of {batch} sequences": format_bytes(manifest.cache.bytes(batch)),
                "files": f"{len(manifest.files)}, {format_bytes(manifest.bytes)}",
                "digests": "SHA-256 of every file verified" if self.verified else "NOT verified; names and sizes were",
                "contract version": manifest.contract_version,
            },
        )


def inspect_artifact(path: Path, *, verify: bool = True) -> Inspection:
    from kvexport.artifact.reading import load_manifest
    from kvexport.backends import all_backends, get

    manifest = load_manifest(path, verify=verify)
    graphs = [_read_graph(path, name, file) for name, file in manifest.graphs.files()]
    backend = get(manifest.recipe.backend.name)
    lacks = "; ".join(problem for problem, _ in backend.problems(manifest.recipe))
    runs_on = " ".join(filter(None, [backend.name, backend.device(manifest.recipe)]))
    described = [other.describe(path, manifest) for other in all_backends()]
    return Inspection(
        path, manifest, graphs, verify, described, f"{runs_on}, which cannot run here: {lacks}" if lacks else runs_on
    )


def _read_graph(path: Path, name: str, file: str) -> Graph:
    try:
        import onnx
    except ImportError:
        return Graph(name, file, None, None)
    try:
        model = onnx.load(str(path / file), load_external_data=False)
    except Exception as error:  # each implementation of protobuf has its own error class
        problem = f"{path / file} is no ONNX graph: {str(error)[:200]}"
        raise ArtifactError(problem, "build the artifact again: kvexport build") from error
    operators = Counter(_qualified(node.domain, node.op_type) for node in model.graph.node)
    functions = {_qualified(f.domain, f.name): len(f.node) for f in model.functions}
    return Graph(name, file, dict(sorted(operators.items())), functions)


def _graph_row(graph: Graph) -> tuple[str, int | None, str]:
    if graph.operators is None:
        return graph.file, None, "unknown: the package onnx, which reads them, is not installed"
    own = [name for name in graph.operators if name.startswith("kvexport.")]
    common = [name for name, _ in Counter(graph.operators).most_common() if name not in own][:5]
    shown = [f"{graph.operators[name]} {name}" for name in (*own, *common)]
    return graph.file, graph.nodes, ", ".join([*shown, *(["..."] if len(shown) < len(graph.operators) else [])])


def _qualified(domain: str, name: str) -> str:
    return f"{domain}.{name}" if domain else name

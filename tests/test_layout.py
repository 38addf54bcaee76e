"""Imports go one way, in the order of docs/reference/architecture.md."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from kvexport.backends.sections import names

PACKAGE = Path(__file__).parent.parent / "kvexport"
# A module may import those above it, never those below. `ops` and `methods` know nothing of models; `engine` knows
# nothing of torch.
ORDER = [
    "version",
    "outbound",
    "errors",
    "units",
    "files",
    "bounded_json",
    "machine",
    "paths",
    "packages",
    "images",
    "schema",
    "methods",
    "sections",  # of the backends: the settings that a recipe may have for them
    "recipe",
    "terminal",
    "quiet",
    "report",
    "plan",
    "ops",
    "artifact",
    "tensor_files",
    "backends",
    "language",
    "state",
    "engine",
    "export",
    "validate",
    "evaluate",
    "calibrate",
    "models",
    "serve",
    "bench",
    "commands",
    "__main__",
]
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "polygraphy"}


# A recipe's keys come from the backends. The registry, its list of sections and every section.py are read with a
# recipe, and import no more than a recipe does.
SECTIONS = re.compile(r"kvexport\.(recipe\.section|backends(\.sections|\.\w+\.section)?)")


def layer(path: Path) -> str:
    return layer_of(module_of(path))


def layer_of(module: str) -> str:
    return "sections" if SECTIONS.fullmatch(module) else module.split(".")[1]


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return (imported module, whether it is imported together with the file) for every import of a file."""
    tree = ast.parse(path.read_text())
    lazy = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    typing = {
        id(n)
        for i in ast.walk(tree)
        if isinstance(i, ast.If) and "TYPE_CHECKING" in ast.dump(i.test)
        for n in ast.walk(i)
    }
    imported = []
    for node in ast.walk(tree):
        at_import = id(node) not in lazy and id(node) not in typing
        if isinstance(node, ast.Import):
            imported += [(alias.name, at_import) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.append((node.module, at_import))
    return imported


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(paths: dict[str, Path]) -> dict[str, set[str]]:
    """Return for each module the modules of `paths` that it imports, in functions and for type checking too."""
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        named = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= whole & paths.keys() or {node.module}
        graph[module] = named & paths.keys() - {module}
    return graph


@cache
def package_graph() -> dict[str, set[str]]:
    return import_graph({module_of(path): path for path in PACKAGE.rglob("*.py")})


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import one another in a circle, with the first again at the end, or []."""
    done: set[str] = set()

    def walk(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph[module]):
            if members := walk(imported, [*trail, module]):
                return members
        done.add(module)
        return []

    return next((members for module in sorted(graph) if (members := walk(module, []))), [])


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    for name, at_import in imports(path):
        if name.startswith("kvexport.") and at_import:
            assert ORDER.index(layer_of(name)) <= ORDER.index(layer(path)), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if layer(p) not in {"ops", "export", "validate"}],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_heavy_packages_are_imported_where_they_are_needed(path: Path) -> None:
    eager = {name.split(".")[0] for name, at_import in imports(path) if at_import}
    allowed = {"onnx"} if path.name == "in_place.py" else set()
    assert not (eager & HEAVY) - allowed


@pytest.mark.parametrize(
    "root", ["kvexport.engine.engine", "kvexport.serve.app", *sorted(f"kvexport.backends.{n}.backend" for n in names())]
)
def test_running_an_artifact_imports_no_module_of_the_build(root: str) -> None:
    graph = package_graph()
    reached, pending = set(), [root]
    while pending:
        module = pending.pop()
        if module not in reached:
            reached.add(module)
            pending += graph[module]
    assert "kvexport.artifact.manifest" in reached
    assert not {module for module in reached if module.split(".")[1] in ("export", "ops", "validate", "evaluate")}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = package_graph()
    members = circle(graph)
    assert not members, " -> ".join(members)


def test_an_import_cycle_is_detected_wherever_its_imports_are(tmp_path: Path) -> None:
    texts = {
        "kvexport.a": "def f():\n    from kvexport import b",
        "kvexport.b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvexport.c import x",
        "kvexport.c": "import kvexport.a",
        "kvexport.d": "import kvexport.a",
    }
    paths = {module: tmp_path / module for module in texts}
    for module, text in texts.items():
        paths[module].write_text(text)
    assert circle(import_graph(paths)) == ["kvexport.a", "kvexport.b", "kvexport.c", "kvexport.a"]
    paths["kvexport.c"].write_text("import kvexport.d")
    assert circle(import_graph(paths)) == ["kvexport.a", "kvexport.b", "kvexport.c", "kvexport.d", "kvexport.a"]
    paths["kvexport.d"].write_text("")
    assert circle(import_graph(paths)) == []


ROOT = PACKAGE.parent
ARCHITECTURE = (ROOT / "docs" / "reference" / "architecture.md").read_text(encoding="utf-8")
NOT_SOURCE = {"__init__.py", "__pycache__", "_native", "_recipes", "py.typed"}


def table_of(folder: str) -> list[str]:
    """Return the names in the first column of the architecture's table of a folder, in order."""
    rows = ARCHITECTURE.split(f"| `{folder}/` | role |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    return [name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize("folder", ["kvexport", "plugins"])
def test_the_architecture_names_everything_at_the_top_of_a_folder(folder: str) -> None:
    there = {path.name for path in (ROOT / folder).iterdir()} - NOT_SOURCE
    assert sorted(table_of(folder)) == sorted(there)


def test_the_architecture_has_the_order_of_imports() -> None:
    named = [name.removesuffix(".py") for name in table_of("kvexport")]
    assert named == [module for module in ORDER if module != "sections"]


def test_every_path_that_the_architecture_names_is_there() -> None:
    """Paths are relative to the repository's root, or to the folder at the beginning of their row."""
    for row in ARCHITECTURE.split("## How a model is traced")[0].splitlines():
        folders = [ROOT / top / name for top in ("kvexport", "plugins") for name in re.findall(r"^\| `(\w+)/`", row)]
        folder = next((path for path in folders if path.is_dir()), None)
        for name in re.findall(r"`([\w/]+(?:/|\.py))`", " | ".join(row.split(" | ")[1:])):
            assert (ROOT / name).exists() or (folder and (folder / name).exists()), name
    for name in re.findall(r"`((?:kvexport|plugins|tests|tools|benchmarks)/[\w/.]*)`", ARCHITECTURE):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([\w./-]+\.md)\)", ARCHITECTURE):
        assert (ROOT / "docs" / "reference" / name).is_file(), name


def test_tests_import_their_modules_without_changes_of_the_path() -> None:
    searching = "sys" + ".path."
    assert [path.name for path in (ROOT / "tests").rglob("*.py") if searching in path.read_text(encoding="utf-8")] == []

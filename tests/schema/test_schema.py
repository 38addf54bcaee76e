"""Tests of the schema: the files written from it are current, errors name the fault, and the state is defined once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvexport.schema.operators import MERGE_CACHE, VOTE_ATTENTION
from kvexport.schema.policy import FIT, POLICY
from kvexport.schema.state import STATE_NAMES, StateTensor
from tests.support.paths import ROOT
from tools import schema
from tools.schema import enumerations, structs


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert schema.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_file_is_named_and_mended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in schema.FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    header = tmp_path / "plugins/abi/kvexport.h"
    header.write_text(header.read_text().replace("float tau;", "double tau;"))
    document = tmp_path / "docs/reference/contract.md"
    document.write_text(document.read_text().replace("| `tau` |", "| `tao` |"))
    assert schema.main(["--check"], tmp_path) == 1
    message = capsys.readouterr().err
    assert "plugins/abi/kvexport.h is not current" in message and "docs/reference/contract.md is not" in message
    assert schema.main([], tmp_path) == 0
    assert schema.main(["--check"], tmp_path) == 0
    assert header.read_text() == (ROOT / "plugins/abi/kvexport.h").read_text()
    document.write_text(document.read_text().replace("<!-- schema: MergePolicy -->", ""))
    with pytest.raises(ValueError, match="0 tables marked `<!-- schema: MergePolicy -->`"):
        schema.main(["--check"], tmp_path)


def test_a_compiler_lays_the_structs_out_as_the_tests_mirror_them(tmp_path: Path) -> None:
    import ctypes

    from tests.conformance.cuda_library import STRUCTURES

    lines = []
    for name, fields in structs().items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{f.name} %zu\\n", offsetof({name}, {f.name}));' for f in fields]
    source = tmp_path / "layout.c"
    source.write_text(f'#include "kvexport.h"\n#include <stdio.h>\nint main(void) {{ {" ".join(lines)} return 0; }}')
    command = ["gcc", "-I", str(ROOT / "plugins" / "abi"), str(source), "-o", str(tmp_path / "layout")]
    subprocess.run(command, check=True, timeout=60)
    actual = subprocess.run([str(tmp_path / "layout")], capture_output=True, text=True, check=True, timeout=60).stdout
    expected = []
    for name, fields in structs().items():
        expected.append(f"{name} {ctypes.sizeof(STRUCTURES[name])}")
        expected += [f"{name}.{f.name} {getattr(STRUCTURES[name], f.name).offset}" for f in fields]
    assert actual.splitlines() == expected


def test_a_node_takes_no_attribute_but_its_own() -> None:
    good = {"budget": [8, 6], "sinks": 1, "recent": [2, 1], "sliding_window": 0, "statistics": ["none"]}
    good |= {"compresses": True, "recent_receives": False}
    assert MERGE_CACHE.node_attributes(good)["statistics"] == "none"
    for change, message in (
        ({"method": "h2o"}, "MergeCache has no attribute method; it has capacity, budget, "),
        ({"budget": [8, 0]}, "MergeCache: budget is 0, and has to be at least 1"),
        ({"statistics": ["entropy"]}, "MergeCache: statistics is 'entropy'; known: none, log_ema, probability"),
        ({"inverse_frequencies": [float("nan")]}, "inverse_frequencies is nan, and has to be a number"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            MERGE_CACHE.node_attributes({**good, **change})
    del good["sinks"]
    with pytest.raises(ValueError, match="MergeCache needs the attribute sinks"):
        MERGE_CACHE.node_attributes(good)


def test_every_word_has_a_number_and_every_field_a_meaning() -> None:
    assert set(enumerations()) == {"statistic", *(a.name for a in (*POLICY, *FIT) if a.kind == "word")}
    for attribute in (*VOTE_ATTENTION.attributes, *MERGE_CACHE.attributes):
        assert attribute.meaning
        assert attribute.default is None or not attribute.problem(attribute.default), attribute.name


@pytest.mark.parametrize("dims", [("H", "B", "C"), ("B", "X"), ("B", "C"), ()])
def test_a_state_tensor_of_unknown_dimensions_is_refused(dims: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="the state tensor mine has the dimensions"):
        StateTensor("mine", dims, "float32", "-")


def test_the_schema_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvexport.schema.operators; sys.exit(any(m in sys.modules for m in ('torch', 'onnx', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_the_state_is_defined_once() -> None:
    """The state is defined once: no other list has its names, and no code calculates with their number."""
    written_out = re.compile(r",\s*".join(f"[\"']{name}[\"']" for name in STATE_NAMES))
    for path in [*(ROOT / "kvexport").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        text = path.read_text()
        assert not written_out.search(text), path
        if "kvexport" in path.parts:
            assert not re.search(r"\b5 \* n\b|past\[5\b", text), path
    assert sorted(STATE_NAMES) == ["key", "position", "score", "value", "votes"]

"""The table of GGUF's block types in docs/tasks/quantize.md says how many bits a weight takes in each place."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvexport.export.model.ggml_blocks import LAYOUTS
from kvexport.export.model.gguf import FLOATS, TYPES
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "tasks" / "quantize.md").read_text()
SIZE = 4096  # inputs and outputs of a matrix
# Prints the bits of a weight in panels, for lines of bits, sign, group, type of scales, minimum and table.
PANELS = """#include <cstdio>
#include "abi/kvexport.h"
#include "cpu/linear/panels.h"
int main() {
  KvWeight weight{};
  const int8_t table[16] = {};
  int minimum, with_table;
  while (scanf("%d %d %ld %d %d %d", &weight.bits, &weight.is_signed, &weight.group, &weight.scale_type, &minimum,
               &with_table) == 6) {
    weight.minimum_type = weight.scale_type, weight.minimum = minimum ? table : nullptr;
    weight.table = with_table ? table : nullptr;
    printf("%.17g\\n", static_cast<double>(kv::layout_of(weight, SIZE).panel) * 8 / (SIZE * kv::kPanelColumns));
  }
}
"""
SCALES = {"float32": 0, "float16": 1, "uint8": 16, "int8": 17, "uint4": 18, "int6": 19}  # as in plugins/abi


def listed() -> dict[str, list[str]]:
    """Return the cells of the page's table by the name of the type."""
    lines = (
        PAGE.partition("types, tests/export/test_gguf_types.py -->")[2]
        .partition("<!-- end of")[0]
        .strip()
        .splitlines()[2:]
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_the_bits_in_files_and_artifacts_are_those_of_the_table() -> None:
    kept = {name: (values, size) for name, values, size in TYPES.values() if name in LAYOUTS}
    assert listed().keys() == kept.keys()
    for name, (values, size) in kept.items():
        packing = LAYOUTS[name].packing
        stored = sum(part.nbytes for part in packing.tensors(SIZE, SIZE).values() if part.shape != (16,))
        in_file, in_artifact = size * 8 / values, stored * 8 / SIZE**2
        assert listed()[name][:2] == [f"{in_file:.4g}", f"{in_artifact:.4g}"]
        assert in_artifact <= in_file * 1.03


def test_the_bits_in_memory_are_those_of_the_table(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("not reached: there is no C++ compiler on this machine")
    (tmp_path / "panels.cpp").write_text(PANELS)
    options = ["-std=gnu++17", f"-DSIZE={SIZE}", f"-I{ROOT / 'plugins'}", "-o", str(tmp_path / "panels")]
    subprocess.run([compiler, *options, str(tmp_path / "panels.cpp")], check=True)
    packings = [LAYOUTS[name].packing for name in listed()]
    lines = [
        f"{x.bits} {x.signed:d} {x.group} {SCALES[x.scale_dtype]} {x.offset == 'minimum':d} {bool(x.table):d}"
        for x in packings
    ]
    done = subprocess.run([tmp_path / "panels"], input="\n".join(lines), capture_output=True, text=True, check=True)
    bits = [f"{float(line):.4g}" for line in done.stdout.split()]
    assert bits == [cells[2] for cells in listed().values()]


def test_every_other_type_is_named() -> None:
    others = [name for name, *_ in TYPES.values() if name not in LAYOUTS and name not in FLOATS]
    refused = re.search(r"kvexport refuses\s+the types (.+?)\.", PAGE, re.DOTALL)
    assert refused is not None
    assert re.findall(r"`(\w+)`", refused[1]) == others

"""The library of the TensorRT plugins: its exports, ten thousand mutated fields with sanitizers, the real registry.

The registry belongs to TensorRT's lean runtime. The tests find it among the installed packages, in
build-cache/tensorrt-site and at ``KVEXPORT_TENSORRT_SITE``. A skipped test names the missing part and the command that
provides it.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.building import make
from tests.support.tensorrt_harness import FIELDS, what_is_missing


@pytest.fixture(scope="module")
def library() -> Path:
    if missing := what_is_missing():
        pytest.skip(missing)
    return make.build("tensorrt-host")


def test_the_library_exports_two_names_and_links_no_tensorrt(library: Path) -> None:
    for tool in ("nm", "readelf"):
        if not shutil.which(tool):
            pytest.skip(f"not reached: {tool} was not found (apt-get install binutils)")
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in symbols.splitlines()} == {"getCreators", "setLoggerFinder"}
    needed = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" in needed and not re.search(r"NEEDED.*(nvinfer|nvonnx|cudart)", needed)


def test_a_missing_library_is_one_line_with_the_command_that_gets_it(tmp_path: Path) -> None:
    script = [sys.executable, str(make.PLUGINS / "build.py"), "tensorrt-host"]
    done = subprocess.run(
        script, env={**os.environ, "TENSORRT_INCLUDE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    lacks = f"TENSORRT_INCLUDE_DIR={tmp_path} holds no NvInferRuntime.h"
    assert done.stderr == f"kvexport: the target tensorrt-host was not built: {lacks}\n"


# ---- in the registry of the real lean runtime ----

LEAN = """
import json, sys, time
import numpy as np
import tensorrt_lean as trt

path, all_fields = sys.argv[1], json.loads(sys.argv[2])
registry, answer = trt.get_plugin_registry(), {"version": trt.__version__}
start = time.process_time()  # not the neighbours
registry.load_library(path)
creators = {name: registry.get_creator(name, "1", "kvexport") for name in all_fields}
answer["milliseconds"] = 1e3 * (time.process_time() - start)
answer["found"] = {name: creator is not None for name, creator in creators.items()}
answer["fields"] = {name: [field.name for field in creator.field_names] for name, creator in creators.items()}
answer["elsewhere"] = registry.get_creator("MergeCache", "2", "kvexport") is not None

def create(name, fields, phase=trt.TensorRTPhase.BUILD):
    of = trt.PluginFieldType
    types = {1: (of.FLOAT32, np.float32), 5: (of.INT32, np.int32), 6: (of.CHAR, np.int8)}
    arrays = {n: np.frombuffer(bytes(data), types[kind][1]) for n, (kind, data) in fields.items()}
    made = [trt.PluginField(n, arrays[n], types[kind][0]) for n, (kind, _) in fields.items()]
    return creators[name].create_plugin("layer", trt.PluginFieldCollection(made), phase)

made = {name: [create(name, fields) for _ in range(64)] for name, fields in all_fields.items()}
answer["made"] = {name: sum(plugin is not None for plugin in plugins) for name, plugins in made.items()}
answer["runtime"] = [create(name, x, trt.TensorRTPhase.RUNTIME) is not None for name, x in all_fields.items()]
left_out = ("scale", "budget")
fewer = [(name, {n: f for n, f in fields.items() if n not in left_out}) for name, fields in all_fields.items()]
answer["refused"] = [create(name, fields) is None for name, fields in fewer]
print(json.dumps(answer))
"""
GET_LEAN = "pip install --target build-cache/tensorrt-site tensorrt-lean"


def lean_site() -> dict[str, str] | None:
    """Return the environment in which tensorrt_lean can be imported, or None."""
    for site in (os.environ.get("KVEXPORT_TENSORRT_SITE"), str(make.ROOT / "build-cache" / "tensorrt-site")):
        if site and (Path(site) / "tensorrt_lean").is_dir():
            return {**os.environ, "PYTHONPATH": site + os.pathsep + os.environ.get("PYTHONPATH", "")}
    return dict(os.environ) if importlib.util.find_spec("tensorrt_lean") else None


def test_the_real_registry_takes_the_library_and_makes_plugins(library: Path) -> None:
    environment = lean_site()
    if environment is None:
        pytest.skip(f"not reached: TensorRT's own registry: {GET_LEAN}")
    given = {op: {n: (kind, list(data)) for n, (kind, data, _) in fields.items()} for op, fields in FIELDS.items()}
    command = [sys.executable, "-c", LEAN, str(library), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["found"] == dict.fromkeys(FIELDS, True) and not answer["elsewhere"]
    for op, fields in FIELDS.items():
        assert set(fields) <= set(answer["fields"][op])
    optional = {"capacity", "reference_queries", "value_prefix"}
    assert set(FIELDS["VoteAttention"]) | optional == set(answer["fields"]["VoteAttention"])
    assert answer["made"] == dict.fromkeys(FIELDS, 64)
    assert answer["runtime"] == answer["refused"] == [True] * len(FIELDS)
    for name in ("scale", "budget"):
        assert f"the field {name} is missing" in done.stdout + done.stderr
    assert answer["milliseconds"] < 50

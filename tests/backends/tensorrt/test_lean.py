"""kvexport's code with the plugin registry of the real lean runtime.

It registers the plugins, and asks them about the nodes that the exporter writes. The test runs in a separate process.
It is skipped if the lean runtime or the plugins for the host are missing, with the command that provides them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plugins.building import make
from tests.backends.tensorrt.test_library import GET_LEAN, lean_site
from tests.support.artifacts import PYTHON_PATH
from tests.support.tensorrt_harness import what_is_missing

ASK = """
import json, sys
import onnx
import tensorrt_lean as trt
from kvexport.backends.tensorrt.graphs import for_tensorrt
from kvexport.errors import EnvironmentProblem
from kvexport.backends.tensorrt import log
from kvexport.backends.tensorrt import plugin

answer = {"module": trt.__name__, "log": log.make_log(trt).errors}
answer |= {"first": str(plugin.register(trt)), "again": plugin.register(trt)}
graphs = [onnx.load(path, load_external_data=False) for path in sys.argv[1:]]
answer["whys"] = [for_tensorrt(graph, lambda n: plugin.refusal(trt, n))[1] for graph in graphs]
model = onnx.load(sys.argv[2], load_external_data=False)
for node in model.graph.node:
    node.attribute.remove(next(a for a in node.attribute if a.name == "select"))
answer["unknown"] = for_tensorrt(model, lambda n: plugin.refusal(trt, n))[1]
print(json.dumps(answer))
"""


def test_the_plugins_take_the_nodes_of_an_artifact(tiny_artifact: Path) -> None:
    if missing := what_is_missing():
        pytest.skip(missing)
    environment = lean_site()
    if environment is None:
        pytest.skip(f"not reached: TensorRT's own registry: {GET_LEAN}")
    library = make.build("tensorrt-host")
    command = [sys.executable, "-c", ASK, *(str(tiny_artifact / f"{kind}.onnx") for kind in ("decoder", "merge"))]
    paths = os.pathsep.join(filter(None, [environment.get("PYTHONPATH", ""), PYTHON_PATH["PYTHONPATH"]]))
    environment |= {"PYTHONPATH": paths, "KVEXPORT_TENSORRT_PLUGIN": str(library)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["first"] == str(library)
    assert answer["again"] is None
    assert answer["whys"] == [{"VoteAttention": ""}, {"MergeCache": ""}]
    assert answer["unknown"] == {"MergeCache": "the plugin does not take a method without a merge policy"}

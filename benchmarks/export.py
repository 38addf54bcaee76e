"""Memory and time of exporting a checkpoint: kvexport beside onnxruntime-genai's model builder, each in a process of its own.

    python benchmarks/export.py [--shapes 1b 7b] [--work DIR] [--genai DIR_ON_PYTHONPATH]

Peak memory is the kernel's figure for the finished process (maximum resident set, mapped files included). The builder is measured where
`onnxruntime_genai` can be imported; for 7b it is left out (it holds the whole checkpoint).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import RESULTS, SHAPES, make_checkpoint, save


def measured(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Run a command; its wall seconds and peak resident bytes. A shell in between, since a child starts with its parent's peak."""
    start = time.perf_counter()
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@"', "sh", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    errors = process.stderr.read() if process.stderr else b""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed:\n{errors.decode()[-2000:]}")
    return {"seconds": time.perf_counter() - start, "peak_megabytes": usage.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["1b", "7b"])
    parser.add_argument("--work", type=Path)
    parser.add_argument("--genai", default="", help="a folder with onnxruntime_genai, put on PYTHONPATH for its builder alone")
    options = parser.parse_args()
    work = options.work or Path(tempfile.gettempdir()) / "kvexport-benchmark"
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for shape in options.shapes:
        checkpoint = make_checkpoint(shape, work / shape, "float16")
        out, genai_out, recipe = work / f"{shape}-artifact", work / f"{shape}-genai", work / f"{shape}.yaml"
        build = [sys.executable, "-m", "kvexport", "build", "--recipe", str(recipe), "--out", str(out)]
        settings = f"model: {{path: {checkpoint}, dtype: float16}}\ncache: {{method: keepkv, budget: 512}}\nexport: {{weights: %s}}\n"
        rows = {}
        for weights in ("copy", "link") if shape != "7b" else ("link",):
            recipe.write_text(settings % weights)
            rows[f"kvexport, weights: {weights}"] = measured(build, dict(os.environ))
            shutil.rmtree(out)
        if shape != "7b" and options.genai:
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-m", str(checkpoint), "-o", str(genai_out)]
            environment = {**os.environ, "PYTHONPATH": options.genai}
            rows["onnxruntime-genai"] = measured([*command, "-p", "fp16", "-e", "cuda", "-c", str(work / "cache")], environment)
            shutil.rmtree(genai_out)
        results[shape] = rows
        print(shape, json.dumps(rows, indent=1), flush=True)
    previous = json.loads(RESULTS.joinpath("export.json").read_text()) if RESULTS.joinpath("export.json").exists() else {}
    kept = {shape: rows for shape, rows in previous.items() if shape in SHAPES}
    print(save("export", {**kept, **results}))


if __name__ == "__main__":
    main()

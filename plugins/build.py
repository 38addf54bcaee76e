"""Builds the native operators and what they are tested with: `python plugins/build.py TARGET...`, `onnxruntime` where
none is named.

Exit code 3 and one line for each target that says what is missing, where something is; `--check` says it and builds
nothing. `pip install` builds `onnxruntime` by hatch_build.py, and goes on where it cannot.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from building import make
from building.targets import CAPABILITIES, TARGETS
from building.tools import Missing


def main() -> None:
    """See the module's text."""
    options = arguments()
    chosen = {key: getattr(options, key) for key in ("capabilities", "sanitize", "out", "fetch", "everything")}
    failed = False
    for name in options.targets or ["onnxruntime"]:
        try:
            if options.check:
                if problem := make.missing(name):
                    raise Missing(problem)
            elif options.record:
                make.record_resources(options.capabilities or CAPABILITIES)
            else:
                print(make.build(name, **chosen))
        except Missing as error:
            print(f"kvexport: the target {name} was not built: {error}", file=sys.stderr)
            failed = True
    sys.exit(3 if failed else 0)


def arguments() -> argparse.Namespace:
    """The command line."""
    targets = "\n".join(f"  {name:22} {target.meaning}\n{'':24} {target.output}" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\ntargets:\n{targets}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--check", action="store_true", help="say what is missing, and build nothing")
    parser.add_argument(
        "--fetch-headers", dest="fetch", action="store_true", help="take ONNX Runtime's from Debian's package"
    )
    parser.add_argument("--sanitize", default="", help="onnxruntime: address,undefined or thread")
    parser.add_argument("--out", type=Path, help="the folder of the library, of what nvcc and cmake make")
    parser.add_argument(
        "--capabilities", nargs="+", default=[], metavar="N", help="what nvcc compiles for, as 90: this machine's GPUs"
    )
    parser.add_argument("--all", dest="everything", action="store_true", help="cuda-ptx: every kernel, not a sample")
    parser.add_argument("--record", action="store_true", help="cuda: write plugins/cuda/resources.json anew")
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]}; known: {', '.join(TARGETS)}")
    if options.record and options.targets != ["cuda"]:
        parser.error("--record is of the target cuda alone: python plugins/build.py cuda --record")
    return options


if __name__ == "__main__":
    main()

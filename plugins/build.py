"""Build the native operators and the libraries for their tests: `python plugins/build.py TARGET...`.

Without a target `onnxruntime` is built. If something is missing, the exit code is 3, and one line for each target names
what is missing; `--check` only prints these lines. hatch_build.py builds `onnxruntime` for a wheel.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from building import make
from building.targets import CAPABILITIES, TARGETS
from building.tools import Missing


def main() -> None:
    options = arguments()
    settings = {
        key: getattr(options, key) for key in ("capabilities", "sanitize", "machine", "here", "out", "everything")
    }
    failed = False
    for name in options.targets or ["onnxruntime"]:
        try:
            if options.check:
                if problem := make.missing(name):
                    raise Missing(problem)
            elif options.record:
                make.record_resources(options.capabilities or CAPABILITIES)
            else:
                print(make.build(name, **settings))
        except Missing as error:
            print(f"kvexport: the target {name} was not built: {error}", file=sys.stderr)
            failed = True
    sys.exit(3 if failed else 0)


def arguments() -> argparse.Namespace:
    targets = "\n".join(f"  {name:22} {target.meaning}\n{'':24} {target.output}" for name, target in TARGETS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\ntargets:\n{targets}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--check", action="store_true", help="only print what is missing, and build nothing")
    parser.add_argument("--sanitize", default="", help="onnxruntime: address,undefined or thread")
    parser.add_argument("--machine", default="", help="onnxruntime: another processor to compile for, as in aarch64")
    parser.add_argument(
        "--this-machine",
        dest="here",
        action="store_true",
        help="onnxruntime: the best instruction set of this machine alone, unless all were built before",
    )
    parser.add_argument("--out", type=Path, help="the folder of the library, for targets that nvcc or cmake builds")
    parser.add_argument(
        "--capabilities",
        nargs="+",
        default=[],
        metavar="N",
        help="compute capabilities that nvcc compiles for, for instance 90; without it those of this machine's GPUs",
    )
    parser.add_argument("--all", dest="everything", action="store_true", help="cuda-ptx: every kernel, not a sample")
    parser.add_argument("--record", action="store_true", help="cuda: rewrite plugins/cuda/resources.json")
    options = parser.parse_args()
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"unknown target {unknown[0]}; known: {', '.join(TARGETS)}")
    if options.record and options.targets != ["cuda"]:
        parser.error("--record works only with the target cuda: python plugins/build.py cuda --record")
    return options


if __name__ == "__main__":
    main()

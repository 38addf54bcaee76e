"""Greedy tokens of every shipped recipe with a checkpoint, far past the budget: recorded before a change of the code,
compared after it.

    python benchmarks/tokens.py --record FILE        builds each recipe, writes what it generates
    python benchmarks/tokens.py --check FILE         the same, held to the file; exit code 1 where anything differs

Each recipe runs with the native operators and from the functions of its graphs, a prompt alone and a ragged batch of
three, in prompts of several budgets.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

RUN = """
import json, sys
import kvexport
engine = kvexport.load(sys.argv[1], threads=1)
prompts = json.loads(sys.argv[2])
alone = [engine.generate([p], max_new_tokens=48, do_sample=False, eos_token_ids=())[0].token_ids for p in prompts]
batch = [c.token_ids for c in engine.generate(prompts, max_new_tokens=48, do_sample=False, eos_token_ids=())]
print(json.dumps([alone, batch]))
"""
BUILD = """
import sys, kvexport
kvexport.build(sys.argv[1], sys.argv[2])
engine = kvexport.load(sys.argv[2])
print(engine.vocabulary, engine.max_length)
"""


def python(*arguments: str, operators: str = "") -> str:
    environment = {**os.environ, **({"KVEXPORT_OPERATORS": operators} if operators else {})}
    done = subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


def tokens_of(recipe: str) -> dict[str, list[list[list[int]]]]:
    """{operators: [alone, in a batch]} of three prompts."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = str(Path(folder) / "artifact")
        vocabulary, longest = map(int, python(BUILD, recipe, artifact).split())
        dice = random.Random(recipe)
        lengths = [min(n, longest - 64) for n in (700, 333, 41)]
        prompts = json.dumps([[dice.randrange(vocabulary) for _ in range(n)] for n in lengths])
        return {
            name: json.loads(python(RUN, artifact, prompts, operators=off))
            for name, off in (("native", ""), ("functions", "off"))
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--check", type=Path)
    options = parser.parse_args()
    names = sorted(
        p.stem
        for p in (Path(__file__).parent.parent / "recipes").glob("*.yaml")
        if p.stem.split("-")[0] in ("tiny", "small")
    )
    names = [n for n in names if not n.endswith("-base")]
    expected = json.loads(options.check.read_text()) if options.check else {}
    found = {}
    different = 0
    for name in names:
        found[name] = tokens_of(name)
        same = found[name] == expected.get(name)
        different += not same
        print(name, "recorded" if options.record else "the same" if same else "DIFFERENT", flush=True)
    if options.record:
        options.record.write_text(json.dumps(found) + "\n")
    elif different:
        sys.exit(1)


if __name__ == "__main__":
    main()

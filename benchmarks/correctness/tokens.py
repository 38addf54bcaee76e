"""Greedy tokens of every method on the trained checkpoints, far past the budget, compared across a change of the code.

    python benchmarks/correctness/tokens.py --record FILE    builds each recipe and writes the generated tokens
    python benchmarks/correctness/tokens.py --check FILE     compares with the file; exit code 1 if any token differs

Each recipe runs with the native operators and with the functions of its graphs. Each of three prompts runs alone, then
all three run in a ragged batch. Their lengths are several budgets.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.common import TEST_RECIPES, options_of
from kvexport.methods import all_methods

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
kvexport.build(sys.argv[1], sys.argv[2], sys.argv[3:])
engine = kvexport.load(sys.argv[2])
print(engine.vocabulary, engine.max_length)
"""
# Recent windows and thresholds of single methods with which the tokens were recorded.
SETTINGS = {
    "tiny-ballot": ["cache.recent=0.3"],
    "tiny-kvslimmer": ["cache.recent=0.25"],
    "tiny-asymkv": ["cache.recent=0.25"],
    "tiny-keepkv": ["cache.parameters.threshold=0.7"],
}


def recipes() -> dict[str, list[str]]:
    """Return the arguments of `kvexport.build` by name: a recipe and its overrides."""
    small = str(TEST_RECIPES / "small-base.yaml")
    named = {f"tiny-{method}": ["tiny-base", f"cache.method={method}"] for method in all_methods()}
    named |= {f"small-{method}": [small, f"cache.method={method}"] for method in ("ballot", "full", "keepkv")}
    measured = [f"{model}-{of}" for model in ("tiny", "small") for of in ("listed", "heads")]
    named |= {name: [str(TEST_RECIPES / f"{name}.yaml")] for name in measured}
    return {name: [*named[name], *SETTINGS.get(name, [])] for name in sorted(named)}


def python(*arguments: str, operators: str = "") -> str:
    environment = {**os.environ, **({"KVEXPORT_OPERATORS": operators} if operators else {})}
    done = subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.strip().splitlines()[-1]


def tokens_of(name: str, recipe: str, *overrides: str) -> dict[str, list[list[list[int]]]]:
    """Return {operators: [tokens alone, tokens in a batch]} of three prompts, drawn by the name."""
    with tempfile.TemporaryDirectory() as folder:
        artifact = str(Path(folder) / "artifact")
        vocabulary, longest = map(int, python(BUILD, recipe, artifact, *overrides).split())
        dice = random.Random(name)
        lengths = [min(n, longest - 64) for n in (700, 333, 41)]
        prompts = json.dumps([[dice.randrange(vocabulary) for _ in range(n)] for n in lengths])
        return {
            operators: json.loads(python(RUN, artifact, prompts, operators=off))
            for operators, off in (("native", ""), ("functions", "off"))
        }


def main() -> None:
    parser = options_of(__doc__)
    file = parser.add_mutually_exclusive_group(required=True)
    file.add_argument("--record", type=Path, help="the file to write the tokens to")
    file.add_argument("--check", type=Path, help="the file to compare the tokens with")
    options = parser.parse_args()
    expected = json.loads(options.check.read_text()) if options.check else {}
    tokens_by_name = {}
    different = 0
    for name, recipe in recipes().items():
        if options.check and name not in expected:
            continue
        tokens_by_name[name] = tokens_of(name, *recipe)
        same = tokens_by_name[name] == expected.get(name)
        different += not same
        print(name, "recorded" if options.record else "the same" if same else "DIFFERENT", flush=True)
    if options.record:
        options.record.write_text(json.dumps(tokens_by_name) + "\n")
    elif different or expected.keys() - tokens_by_name.keys():
        sys.exit(1)


if __name__ == "__main__":
    main()

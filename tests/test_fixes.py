"""Every `fix:` line that names an option or a command is run, and has to change the outcome of what failed.

`sites` finds the fix lines in the package's source. A line that only the user can follow ("download the file again")
has no option and no command. Each other line has a case in `CASES`, or is counted in `NOT_RUN` with the reason.
"""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers import GPT2Config, MistralConfig

from kvexport import errors
from kvexport.artifact.digests import write_manifest
from kvexport.artifact.reading import load_manifest
from kvexport.paths import PACKAGE
from tests.export import test_shared_caches
from tests.support import hybrids
from tests.support.command_line import run
from tests.support.models import SIZES, save_checkpoint

ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type) and name != "Any"}
COMMAND = r"(?:kvexport|mkdir|rm|mv|cp) "
RUNS = re.compile(rf"--[a-z]|\b{COMMAND}|\b(?:pip|ulimit|hf|git lfs|python|iconv) |\b[A-Z_]{{3,}}=")


@cache
def sites() -> dict[tuple[str, int], str]:
    """Return the source of each fix line that names an option or a command, by its file and line."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        named: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    named[ast.unparse(target)] = named.get(ast.unparse(target), "") + ast.unparse(node.value)
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for function, node in ((outer, node) for outer in functions for node in ast.walk(outer)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ERRORS and len(node.args) > 1:
                fix = node.args[1]
                text = named.get(ast.unparse(fix), ast.unparse(fix))
                literal = text != ast.unparse(fix) or isinstance(fix, ast.Constant | ast.JoinedStr | ast.IfExp)
                if RUNS.search(text) or not literal:  # the text is put together elsewhere
                    problem = named.get(ast.unparse(node.args[0]), ast.unparse(node.args[0]))
                    found[str(path.relative_to(PACKAGE)), node.lineno] = f"{function.name}: {problem}: {text}"
    return found


# The number of fix lines of each file that no case runs, by the reason.
NOT_RUN: dict[str, dict[str, int]] = {
    "it takes a GPU, or CUDA or TensorRT": {
        "backends/libraries.py": 1, "backends/onnxruntime/backend.py": 1, "backends/onnxruntime/devices.py": 3,
        "backends/onnxruntime/session.py": 3, "backends/tensorrt/backend.py": 2, "backends/tensorrt/cuda.py": 3,
        "backends/tensorrt/engines.py": 3, "backends/tensorrt/environment.py": 4, "backends/tensorrt/graphs.py": 1,
        "backends/tensorrt/plans.py": 2, "backends/tensorrt/record.py": 2, "backends/tensorrt/weights.py": 1,
        "state/periodic.py": 1,
    },
    "it installs a package, or another program": {
        "export/model/gguf_tokenizer.py": 1, "language/grammar.py": 1, "images/decode.py": 1, "packages.py": 3,
        "evaluate/corpus.py": 1,
    },
    "it takes the hub or another server on the network": {
        "export/model/hub.py": 5, "export/model/wheel.py": 2,
    },
    "it takes a full disk, a limit of memory or files, or a folder of another user": {
        "artifact/publish.py": 7, "artifact/reading.py": 1, "calibrate/measured.py": 2, "commands/cached.py": 1,
        "commands/errors.py": 5, "export/model/cached.py": 1, "language/text_trial.py": 1, "machine.py": 2,
        "serve/connections.py": 1,
    },
    "it measures for minutes": {
        "calibrate/default.py": 2, "calibrate/facts.py": 1, "calibrate/head_costs.py": 1,
        "calibrate/head_shares.py": 3, "calibrate/texts.py": 3,
        "evaluate/language.py": 2, "evaluate/measure.py": 2, "evaluate/reference.py": 1, "evaluate/runner.py": 1,
        "evaluate/settings.py": 1, "evaluate/suites.py": 1, "commands/output.py": 1, "commands/validate.py": 1,
        "validate/layers.py": 2,
    },
    "it starts a server": {
        "commands/serve.py": 1, "language/forms.py": 1, "serve/run.py": 1, "serve/service.py": 1,
        "serve/sessions.py": 1, "state/sessions.py": 1,
    },
    "it takes a model, an adapter or a recipe of the user's own in place of one that does not fit": {
        "backends/adapters.py": 4, "plan/planner.py": 5, "export/build.py": 1,
        "export/model/checkpoint.py": 4, "export/model/tensors.py": 1, "export/model/config.py": 2,
        "export/model/gguf_model.py": 1, "export/model/quantized/reading.py": 1,
        "export/model/rotary.py": 1, "export/weights/computed.py": 1, "export/weights/specs.py": 1,
        "recipe/load.py": 1, "tensor_files/casting.py": 1, "tensor_files/peft.py": 1, "tensor_files/shards.py": 2,
    },
    "it builds an artifact again from sources that are not known here": {
        "artifact/digests.py": 1, "commands/chat.py": 1, "commands/inspect.py": 1, "export/rebuild.py": 3,
        "language/chat.py": 8, "language/tokenizer.py": 3,
    },
    "only a program that calls the package, or an engine of another kind, reaches it": {
        "backends/sections.py": 1, "commands/generate.py": 1, "engine/core.py": 1,
    },
}  # fmt: skip

# A file, a part of the function, problem and fix line of one place in it, and a command that fails there. R stands for
# --recipe and a recipe, key=value for --set key=value, and words in capitals for what `Places` makes.
SHARES = "cache.allocation.kind=listed cache.allocation.shares=[[1.0,1.0],[1.0,1.0],[1.0,1.0]]"
CASES = [
    ("plan/budgets.py", "one for each", "plan R cache.allocation.kind=listed cache.allocation.shares=[[1.0,1.0]]"),
    ("plan/budgets.py", "whole={", "plan R cache.allocation.whole=[1,7] cache.budget=400"),
    ("plan/budgets.py", "--set cache.budget", "plan R cache.allocation.whole=[1] cache.budget=40"),
    ("artifact/digests.py", "no_artifact", "inspect CHECKPOINT"),
    ("artifact/digests.py", "damaged", "inspect DAMAGED"),
    ("artifact/manifest.py", "unusable", "inspect UNUSABLE"),
    ("artifact/publish.py", "mkdir", "build R --out TMP/no/such"),
    ("artifact/publish.py", "choose a shorter", f"build R --out TMP/{'x' * 230}"),
    ("artifact/publish.py", "can hold it", "build R --out CHECKPOINT/config.json/a"),
    ("artifact/publish.py", "an artifact is a directory", "build R --out CHECKPOINT/config.json"),
    ("artifact/publish.py", "it was not changed", "build R --out CHECKPOINT"),
    ("artifact/reading.py", "_existing", "inspect NOWHERE"),
    ("backends/adapters.py", "were given", "generate ARTIFACT abc --adapter one=ONE"),
    ("backends/tensorrt/section.py", "--device cuda", "build R --backend tensorrt --device cpu"),
    ("bench.py", "--context", "bench ARTIFACT --context 600 --steps 4"),
    ("bench.py", "--batch", "bench ARTIFACT --context 32 --steps 4 --batch 9"),
    ("plan/planner.py", "whole=[]", "plan R cache.positions=cache cache.allocation.whole=[1] cache.budget=300"),
    ("plan/planner.py", "'cache.budget'", "plan R cache.budget=3"),
    ("plan/planner.py", "'cache.budget'", "plan R cache.budget=9 cache.recent=0.75"),
    ("plan/planner.py", "'cache.budget'", "plan WINDOW cache.sinks=10 cache.recent=8"),
    ("plan/planner.py", "selected_plan", "plan R cache.method=full cache.periodic.slots=70 cache.sinks=40"),
    ("plan/planner.py", "_no_merges: f'speculate", "plan R speculate.draft=ngram"),
    ("plan/planner.py", "_no_merges: f'cache.periodic", "plan R cache.periodic.slots=128"),
    ("plan/planner.py", "cache.dtype=int8", "plan ODD cache.dtype=int4"),
    ("plan/planner.py", "one_place: f'cache.positions is cache, but layer", "plan WINDOW cache.positions=cache"),
    ("plan/planner.py", "states_kept: f'cache.pos", "plan STATES cache.positions=cache"),
    ("plan/planner.py", "states_kept: f'speculate", "plan STATES speculate.draft=ngram"),
    ("plan/planner.py", "_pins_kept", "plan R cache.pinned=8 cache.method=full"),
    ("plan/planner.py", "_pins_kept", "plan R cache.pinned=8 cache.positions=cache"),
    ("plan/planner.py", "_not_periodic", "plan STATES cache.periodic.slots=128"),
    ("plan/planner.py", "backend.name=", "plan SHARED backend.name=tensorrt"),
    ("plan/planner.py", "backend.device=cpu", "plan SHARED backend.device=cuda"),
    ("plan/planner.py", "caches_read: f'cache.allocation", f"plan SHARED {SHARES}"),
    ("commands/build.py", "--from", "build --from ARTIFACT R --out TMP/from"),
    ("commands/cached.py", "kvexport list", "rm nonsense"),
    ("commands/docs.py", "kvexport docs", "docs nonsense"),
    ("commands/generate.py", "--system or", "generate ARTIFACT --system abc --token-ids 1,2"),
    ("commands/generate.py", "--chat or", "generate ARTIFACT --chat --token-ids 1,2"),
    ("commands/generate.py", "--greedy", "generate ARTIFACT abc --temperature 0"),
    ("commands/generate.py", "'--token-ids 1,2,3'", "generate ARTIFACT --token-ids 1,x"),
    ("commands/generate.py", "one of", "generate ARTIFACT"),
    ("commands/generate.py", "a file you may read", "generate ARTIFACT --prompt-file NOWHERE"),
    ("commands/options.py", "--adapter", "generate ADAPTED abc --adapter one"),
    ("export/graph/adapters.py", "adapters.targets", "build R --out TMP/a adapters.count=1 adapters.targets=[none]"),
    ("export/model/checkpoint.py", "neither a directory", "plan /no/such/model"),
    ("export/model/checkpoint.py", "local.parent", "plan CHECKPOINT/config.json"),
    ("tensor_files/shards.py", "remove-destination", "plan LINKED"),
    ("export/model/config.py", "limits.max_length={positions}", "plan R limits.max_length=100000"),
    ("export/model/config.py", "=chunks", "plan R cache.positions=cache limits.max_length=900 cache.merge_prompts=end"),
    ("export/rebuild.py", "--backend", "build --from ARTIFACT --out TMP/from"),
    ("models.py", "kvexport chat", "build ARTIFACT"),
    ("models.py", "leave --budget", "generate ARTIFACT abc --budget 9 --max-new-tokens 2"),
    ("models.py", "kvexport {verb} MODEL", "plan"),
    ("models.py", "kvexport calibrate", "build R --calibrate --out TMP/c"),
    ("recipe/load.py", "kvexport recipes", "plan --recipe nonsense"),
    ("tensor_files/shards.py", "BASE_MODEL", "plan ONE"),
    ("validate/layers.py", "--layers 1", "validate ARTIFACT --layers 9"),
    ("validate/tokens.py", "--batch", "validate ARTIFACT --batch 9"),
]  # fmt: skip

# What the words of a fix line stand for, longest first.
WORDS = {
    "NAME=FOLDER": "one=ONE", "FOLDER/NAME": "start/install", "ORG/NAME": "CHECKPOINT", "BASE_MODEL": "CHECKPOINT",
    "DIRECTORY": "CHECKPOINT", "MODEL": "CHECKPOINT", "ARTIFACT": "TMP/built", "NAME": "tiny-keepkv", "PROMPT": "abc",
    "DIR": "ARTIFACT", "FILE": "RECIPE",
}  # fmt: skip
NO_PLACE = ("", 0)  # of an option that does not exist
FLAGS = {"--greedy", "--chat", "--calibrate"}  # options without a value

FIXTURES = {
    "RECIPE": "tiny_recipe",
    "CHECKPOINT": "tiny_checkpoint",
    "ARTIFACT": "tiny_artifact",
    "ADAPTED": "adapted_artifact",
}


class Places:
    """The files and folders that cases name in capitals; what only one case needs is made when it is named."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder, self.request = folder, request
        self.known: dict[str, Path] = {"TMP": folder, "NOWHERE": folder / "nowhere"}

    def filled(self, argument: str) -> list[str]:
        if argument == "R":
            return ["--recipe", str(self.place("RECIPE"))]
        return [re.sub(r"\b[A-Z]{3,}\b", lambda found: str(self.place(found[0])), argument)]

    def place(self, name: str) -> Path | str:
        if name not in self.known:
            if name in FIXTURES:
                self.known[name] = self.request.getfixturevalue(FIXTURES[name])
            elif name == "ONE":
                self.known[name] = self.request.getfixturevalue("adapters")["one"]
            elif hasattr(self, name.lower()):
                self.known[name] = getattr(self, name.lower())()
        return self.known.get(name, name)

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.place(name), self.folder / f"copy-of-{name.lower()}"))

    def window(self) -> Path:
        config = MistralConfig(**SIZES, sliding_window=16)
        return save_checkpoint(self.folder / "window", config)

    def odd(self) -> Path:
        return save_checkpoint(
            self.folder / "odd", GPT2Config(n_embd=30, n_head=2, n_layer=2, vocab_size=100, n_positions=512)
        )

    def states(self) -> Path:
        return save_checkpoint(self.folder / "states", hybrids.CONFIGS["lfm2"]())

    def shared(self) -> Path:
        return save_checkpoint(self.folder / "shared", test_shared_caches.CONFIGS["gemma4_text"]())

    def linked(self) -> Path:
        folder = self.copy("CHECKPOINT")
        (folder / "model.safetensors").rename(self.folder / "elsewhere.safetensors")
        (folder / "model.safetensors").symlink_to(self.folder / "elsewhere.safetensors")
        return folder

    def damaged(self) -> Path:
        folder = self.copy("ARTIFACT")
        (folder / "decoder.onnx").write_bytes(b"")
        return folder

    def unusable(self) -> Path:
        folder = self.copy("ARTIFACT")
        manifest = {**load_manifest(folder).to_json(), "limits": {}}
        write_manifest(folder, manifest)
        return folder


def advised(fix: str) -> Iterator[list[str]]:
    """Return the commands and options that a fix line names, each as a list of arguments; "leave" removes options."""
    fix, command = fix.replace("`", ""), list[str]()
    if left := re.search(r"\bleave (?:out )?((?:--[\w-]+|, | and | or )+)", fix):
        options = re.findall(r"--[\w-]+", left[1])
        yield from [["leave", option] for option in options] if " or " in left[1] else [["leave", *options]]
        fix = fix[left.end() :]
    for part in re.split(rf";|\bor (?:with )?(?=--|kvexport )|: (?=--|{COMMAND})|, (?=and |which |--)|\(", fix):
        start = re.search(rf"({COMMAND}|--[a-z])", part)
        words = shlex.split(part[start.start() :]) if start else []
        options = []
        while words and words[0].startswith("--"):
            option = words.pop(0)
            options.append(option.rstrip(","))
            if "=" not in option and option not in FLAGS:
                options.append(words.pop(0).rstrip(",:") if words and options[-1] == option else "TMP/other")
        if options and command:  # "kvexport build MODEL ..., or with --recipe NAME"
            yield [*(word for word in command if word != "MODEL"), *options]
        elif options:
            yield options
        elif words:
            ends = [i for i in range(1, len(words)) if words[i] in ("shows", "lists", "to") or words[i - 1][-1] == ","]
            command = [word.rstrip(",") for word in words[: ends[0] if ends else None]]
            yield command


def attempt(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, tuple[str, int], str]:
    """Return the exit code and output of a command, and of its last error the place in the source and the fix line."""
    raised = [NO_PLACE]

    def init(self: errors.KvexportError, problem: str, fix: str = "") -> None:
        frame = sys._getframe(1)
        raised.append((str(Path(frame.f_code.co_filename).relative_to(PACKAGE)), frame.f_lineno))
        original(self, problem, fix)

    original = errors.KvexportError.__init__
    with monkeypatch.context() as patch:
        patch.setattr(errors.KvexportError, "__init__", init)
        result = run(*arguments)
    return result.exit_code, result.output, raised[-1], result.stderr.partition("  fix: ")[2].strip()


def site_of(file: str, part: str) -> tuple[str, int]:
    """Return the only place in a file whose function, problem or fix line contains a text."""
    found = [site for site, text in sites().items() if site[0] == file and part in text]
    assert len(found) == 1, (file, part, found)
    return found[0]


@pytest.mark.parametrize(("file", "part", "command"), CASES)
def test_the_fix_changes_the_outcome(
    file: str, part: str, command: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    places, site = Places(tmp_path, request), site_of(file, part)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = re.sub(r" (?=[a-z]+\.[a-z_.]+=)", " --set ", command)
    failing = [x for argument in command.split() for x in places.filled(argument)]
    code, output, place, fix = attempt(failing, monkeypatch)
    assert code != 0 and place == site, (place, output)
    lines = list(advised(fix))
    assert lines, fix
    for line in lines:
        words = [re.sub("|".join(WORDS), lambda x: WORDS[x[0]], x) for x in line]
        words = [x for word in words for x in places.filled(word)]
        again = failing
        if words[0].startswith("--"):
            again = [*failing, *words]
        elif words[0] == "leave":
            again = without(failing, words[1:])
        elif words[0] == "kvexport":
            code, output, place, _ = attempt(words[1:], monkeypatch)
            assert code == 0 or place not in (site, NO_PLACE), output
            if words[1] != "build" or "--from" in words:
                continue
            assert code == 0, output
            again = [words[words.index("--out") + 1] if x == failing[1] else x for x in failing]
        else:
            subprocess.run(words, check=True)
        code, output, place, _ = attempt(again, monkeypatch)
        assert code == 0 or place not in (site, NO_PLACE), (again, output)


def without(command: list[str], options: list[str]) -> list[str]:
    kept = [*command]
    for option in options:
        if option in kept:
            at = kept.index(option)
            del kept[at : at + (1 if option in FLAGS else 2)]
    return kept


def test_every_fix_line_has_a_case_or_a_reason() -> None:
    run_here = {site_of(file, part) for file, part, _ in CASES}
    left = Counter(file for file, line in sites() if (file, line) not in run_here)
    listed = sum((Counter(files) for files in NOT_RUN.values()), Counter[str]())
    assert left == listed, "a new fix line needs a case in CASES, or a reason in NOT_RUN"

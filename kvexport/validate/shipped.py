"""Greedy answers of an engine on a GPU with CUDA graphs and with calls that start before the last one is read.

Deployed engines run in this way. The engine that is compared with PyTorch runs without CUDA graphs, and reads every
token before the next step begins. Both run the same kernels, so their tokens must be equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvexport.engine.engine import Engine
from kvexport.language.settings import GenerationSettings
from kvexport.validate.tokens import Ids

MERGES = 3  # least number of merges between the decode steps of an answer, if the longest sequence has room for them


def shipped_difference(opened: Callable[[bool], Engine], tokens: Sequence[Ids]) -> str:
    """Return where greedy answers with and without CUDA graphs first differ; "" if they are equal."""
    plain, shipped = ([list(x) for x in _answers(opened(graphs), tokens, ahead=graphs)] for graphs in (False, True))
    for sequence, (expected, found) in enumerate(zip(plain, shipped, strict=True)):
        for step, (other, token) in enumerate(zip(expected, found, strict=True)):
            if token != other:
                return f"token {step} of the answer to sequence {sequence} is {token} with them and {other} without"
    return ""


def _answers(engine: Engine, tokens: Sequence[Ids], *, ahead: bool) -> list[list[int]]:
    engine.options = replace(engine.options, ahead=ahead)
    steps = min(max(map(len, tokens)) // 2, (MERGES + 1) * engine.manifest.recipe.cache.merge_every)
    prompts = [ids[: max(1, len(ids) // 2)].tolist() for ids in tokens]
    settings = GenerationSettings(max_new_tokens=steps, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(prompts, settings)]

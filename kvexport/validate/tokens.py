"""The token sequences on which an exported model is validated: text and random tokens, longer than every budget."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvexport.artifact.manifest import Limits
from kvexport.errors import UsageError
from kvexport.paths import TEXT
from kvexport.plan.cache import CachePlan
from kvexport.plan.planner import settled_plan

Ids = NDArray[np.int64]
IMAGE = "an image, then "  # how the kind of a sequence begins that begins with a picture
CHUNKS_PAST = 2  # chunks of a prompt that follow when the largest KV cache is full
FEWEST_STEPS, MOST_STEPS = 8, 160  # bounds of the number of decode steps
LARGEST = 2.0  # bound of a head's capacity, relative to the mean; some heads have 35 times another head's budget
MEMORY = 2 << 30  # default bound of the bytes of all copies of the lanes' states
# By the parameters that a model has more than: the largest default number of sequences, and the merges of KV caches
# while decoding. PyTorch dequantizes all weights of a packed model for every call, so a large model gets fewer calls.
SEQUENCES = {1e9: 1, 0: 3}
MERGES = {1e9: 1, 0: 2}
COPIES = 10  # copies of a state: two runs of PyTorch and three of the engine, each before and after a call


def later_calls(limits: Limits, merge_prompts: str, parameters: int) -> list[int]:
    """Return the tokens of each call after the prompt: one to decode, more for a later prompt of the conversation."""
    merges = _for(MERGES, parameters)
    steps = merges * limits.merge_every + 4
    if merge_prompts == "chunks" or steps <= MOST_STEPS:
        return [1] * min(max(FEWEST_STEPS, steps), MOST_STEPS)
    turn, chunk = limits.merge_every - FEWEST_STEPS, limits.prefill_chunk
    chunks = [min(chunk, turn - start) for start in range(0, turn, chunk)]
    one = [1] * (FEWEST_STEPS // 2)
    return [*one, *chunks, *one] * merges + [1] * 4


def _for(counts: dict[float, int], parameters: int) -> int:
    return next(count for least, count in counts.items() if parameters >= least)


def default_length(plan: CachePlan, limits: Limits, later: int) -> int:
    capacities = [slots for layer in plan.caches if layer.merges for slots in layer.capacity]
    merging = min(max(capacities), int(LARGEST * sum(capacities) / len(capacities))) if capacities else 0
    return min(limits.max_length, merging + CHUNKS_PAST * limits.prefill_chunk + later)


def default_batch(plan: CachePlan, limits: Limits, parameters: int) -> int:
    fits = MEMORY // (COPIES * plan.bytes(1))
    return int(max(1, min(_for(SEQUENCES, parameters), limits.max_batch, fits)))


def sequences(
    engine: Any, length: int | None, batch: int, seed: int, later: int, image: Sequence[int] = ()
) -> tuple[list[Ids], list[str]]:
    """Return the token ids of every validation sequence, and the kind of each, "text" or "random".

    The longest sequence comes first; the next sequences are 2/3, 1/2, ... as long. Text and random tokens alternate if
    the artifact's tokenizer decodes an encoded text to the same text; otherwise all tokens are random. `later` is the
    number of tokens that follow the prompt of the longest sequence. If the tokens `image` of a picture have room, that
    prompt begins with them, and the sequence's kind with IMAGE.
    """
    limits = engine.manifest.limits
    if not 1 <= batch <= limits.max_batch:
        raise UsageError(
            f"a batch of {batch}, but the artifact was built for 1 to {limits.max_batch}", f"--batch {limits.max_batch}"
        )
    recipe = engine.manifest.recipe
    default = default_length(settled_plan(recipe, engine.plan), limits, later) + len(image)
    longest = min(length or default, limits.max_length)
    text = _text_ids(engine)
    rng = np.random.default_rng(seed)
    tokens, kinds = [], []
    for i in range(batch):
        size = max(1, 2 * longest // (i + 2))
        of_text = text is not None and i % 2 == 0
        kinds.append("text" if of_text else "random")
        tokens.append(
            np.resize(text, size) if of_text and text is not None else rng.integers(0, engine.vocabulary, size)
        )
    if 0 < len(image) <= 2 * longest // 3:
        rest = tokens[0][tokens[0] != engine.manifest.images.token]
        tokens[0], kinds[0] = np.concatenate([image, rest])[:longest], IMAGE + kinds[0]
    return tokens, kinds


def _text_ids(engine: Any) -> Ids | None:
    if engine.tokenizer is None:
        return None
    text = TEXT.read_text(encoding="utf-8")
    ids = engine.tokenizer.encode(text, add_special_tokens=False)
    same = engine.tokenizer.decode(ids).split() == text.split()
    return np.array(ids, dtype=np.int64) if same and max(ids) < engine.vocabulary else None


def schedule(
    tokens: list[Ids], chunk: int, later: Sequence[int], borders: Sequence[int] = ()
) -> Iterator[tuple[list[Ids], bool]]:
    """Yield (tokens of every sequence, whether of a prompt); prompts come in chunks that end at `borders` too."""
    split = [max(2 * len(t) // 3, len(t) - sum(later)) for t in tokens]
    start = 0
    while start < max(split):
        end = min([start + chunk, *(border for border in borders if border > start)])
        yield ([t[start : min(end, s)] if start < s else t[:0] for t, s in zip(tokens, split, strict=True)], True)
        start = end
    for end, width in zip(accumulate(later), later, strict=True):
        call = [t[s + end - width : s + end] for t, s in zip(tokens, split, strict=True)]
        if not any(map(len, call)):
            return
        yield call, width > 1


def continued_prompts(later: Sequence[tuple[list[Ids], bool]]) -> list[int]:
    if not later or not later[0][1]:
        return []
    return [lane for lane, tokens in enumerate(later[0][0]) if len(tokens)]

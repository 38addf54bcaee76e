"""The language of the tiny checkpoint, which is made of words: facts, filler sentences, and questions about facts.

A *fact* reads ``anna lamp .`` (a name, a thing, a full stop). A *filler* sentence is a few common words and a full
stop. A prompt is::

    <bos> facts and filler sentences in random order ? anna

The answer is the one token ``lamp``, followed by ``<eos>``. Names are distinct within a prompt, and so are things, so
that exactly one answer is right. The answer stands only in the prompt, so the checkpoint's answers show directly which
entries a KV cache still holds.
"""

from __future__ import annotations

import math

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SPECIALS = ("<unk>", "<bos>", "<eos>", "<pad>")
MARKS = (".", "?")
NAMES = _words("""
    adam agnes alan alice amir anders anna anton arthur astrid aziz barbara basil beatrice ben bertha bob boris bruno
    carla carlos cecil chloe clara colin conrad cyrus daisy daniel david delia dennis diana dora doris edgar edith elena
    elias emil emma eric ernest esther eva felix fiona flora frank fred freya gavin george gina gloria greta gustav
    hanna harold hector helen henry hilda hugo ida igor ines ingrid irene isaac ivan jacob jane jasper joan jonas judith
    julia karim karl kate kevin kira lars laura leo leila lena linus louis lucy luke mabel magnus maria martin maya
    miles mina mona nadia nathan nina noah nora olga oliver omar oscar otto paula pedro peter petra philip quentin
    rachel ralph rita robert rosa ruth samuel sara simon theo tom wanda
""")
THINGS = _words("""
    anchor apple arrow axe bag ball banjo barrel basket bell belt bench bicycle blanket boat book boot bottle bowl box
    bracelet bread brick broom brush bucket button cabinet camera candle candy carpet cart chain chair cheese clock coat
    coin comb compass cup curtain desk dice dish doll door dress drum easel egg engine fan feather fence flag flute fork
    garlic glove guitar hammer harp hat helmet hook horn hose jacket jar jug kettle key kite knife ladder lamp lantern
    lemon letter lock magnet map mask medal mirror mitten mug nail necklace needle net oar onion orange oven paddle
    paint pan paper pear pearl pen pencil pepper piano pillow pipe plate plum pocket potato pump purse puzzle quilt
    radio rake ribbon ring rope ruler saddle scarf spoon stool table
""")
FILLER = _words("""
    the a and but then when while there here this that these those some many few every other same old new long short
    small large quiet slow early late again often always never soon once now today later under over near far along
    across behind before after around between with without from into it they was were went came seemed stayed
""")
WORDS = SPECIALS + MARKS + NAMES + THINGS + FILLER  # the vocabulary; the id of a word is its index

IDS = {word: index for index, word in enumerate(WORDS)}
UNK, BOS, EOS, PAD, STOP, ASK = (IDS[word] for word in SPECIALS + MARKS)
NAME_IDS = np.array([IDS[word] for word in NAMES])
THING_IDS = np.array([IDS[word] for word in THINGS])
FILLER_IDS = np.array([IDS[word] for word in FILLER])

MAX_FACTS = min(len(NAMES), len(THINGS))
IGNORE = -100  # label of a position without a loss


def filler_sentences(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Return filler sentences of exactly ``count`` tokens in all.

    Each sentence has two to eight words and a full stop. The last sentence may be shorter.
    """
    words = rng.choice(FILLER_IDS, size=count).tolist()
    sentences, start = [], 0
    for size in rng.integers(3, 10, size=count // 3 + 1).tolist():
        end = min(start + size, count)
        if count - end < 3:
            end = min(count, start + 9) if count - start <= 9 else count - 3
        if start == end:
            break
        sentences.append([*words[start : end - 1], STOP])
        start = end
    return sentences


def make_story(
    rng: np.random.Generator, length: int, facts: int, depth: float | None = None
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ``length`` tokens of facts among filler sentences, and the (name, thing) pairs of the facts.

    The pairs are in random order. With ``depth``, the fact of the first pair stands at that fraction of the story's
    sentences (0 first, 1 last), otherwise anywhere.
    """
    if not 1 <= facts <= MAX_FACTS or 3 * facts > length:
        raise ValueError(f"{facts} facts do not fit {length} tokens (at most {min(MAX_FACTS, length // 3)})")
    names = rng.choice(NAME_IDS, size=facts, replace=False).tolist()
    things = rng.choice(THING_IDS, size=facts, replace=False).tolist()
    pairs = list(zip(names, things, strict=True))
    sentences = [[name, thing, STOP] for name, thing in pairs[1:]] + filler_sentences(rng, length - 3 * facts)
    rng.shuffle(sentences)
    place = int(rng.integers(len(sentences) + 1)) if depth is None else round(depth * len(sentences))
    sentences.insert(place, [*pairs[0], STOP])
    return [token for sentence in sentences for token in sentence], pairs


def recall_row(rng: np.random.Generator, length: int) -> tuple[list[int], list[int]]:
    """Return a training row of ``length`` ids and its labels, aligned with the ids.

    The row is ``<bos> story ? NAME THING ? NAME THING ... <eos>``. Only answers and the final ``<eos>`` count in the
    loss. Question marks between two questions do not count, so that the model learns to generate one answer and then
    ``<eos>``.
    """
    most = min(MAX_FACTS, (length - 5) // 3)
    facts = max(1, round(math.exp(rng.uniform(0, math.log(most)))))
    room = (length - 2 - 3 * facts) // 3
    questions = max(1, min(facts, room, int(rng.integers(1 + length // 8))))
    story, pairs = make_story(rng, length - 2 - 3 * questions, facts)
    ids, labels = [BOS, *story], [IGNORE] * (1 + len(story))
    for name, thing in pairs[:questions]:
        ids += [ASK, name, thing]
        labels += [IGNORE, IGNORE, thing]
    return [*ids, EOS], [*labels, EOS]

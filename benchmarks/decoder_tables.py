"""Tables of decoders, from the results of `decoder_types.py`, `decoders.py` and `latent.py`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from table_parts import load, table

PEERS = ("llamacpp", "genai")
MEANING = {
    "equal": "every logit is within 1e-4 of the largest logit, and the most likely next tokens are equal",
    "refused": "the build stops with a reason, before it reads a weight",
    "no text": "transformers does not run the model on tokens alone",
    "not made": "transformers cannot make the tiny model of this page here",
    "different": "a logit differs by more, without an error",
    "leaked": "the build ends with an exception of torch or transformers, without a reason of kvexport",
}
LONGEST = 200  # characters of a reason
ISAS = ("amx", "avx512vnni")
TEXTS = {"source": "source code", "recall": "documents with questions"}


def decoder_tables() -> dict[str, str]:
    """Return every table by its mark."""
    types: dict[str, Any] = load("decoder-types")["types"]
    named = {result: [name for name, x in types.items() if x["result"] == result] for result in MEANING}
    counts = [(result, meaning, str(len(named[result]))) for result, meaning in MEANING.items()]
    counts.append(("all", "", str(len(types))))
    by_initial = groupby(named["equal"], key=lambda name: name[0])
    equal = [(initial, ", ".join(f"`{name}`" for name in names)) for initial, names in by_initial]
    others = [name for result in ("no text", "not made", "different", "leaked") for name in named[result]]
    return {
        "decoder types": table(("result", "meaning", "types"), *counts),
        "decoder types equal": table(("", "types"), *equal),
        "decoder types refused": table(("type", "reason"), *(_row(name, types[name]) for name in named["refused"])),
        "decoder types of other results": table(("type", "reason"), *(_row(name, types[name]) for name in others)),
        "decoders": decoders(),
        "latent": latent(),
    }


def latent() -> str:
    """Return the table of merged latents beside merged keys and values of every head."""
    rows = [
        (f"`{r['method']}`", r["form"], str(r["slots"]), f"{r['bytes'] / 1024:.0f}", *(_shown(r[x]) for x in TEXTS))
        for r in load("latent")["rows"]
    ]
    return table(("method", "cache", "slots", "KiB of a sequence", *(f"KL, {what}" for what in TEXTS.values())), *rows)


def _shown(figure: list[float]) -> str:
    value, low, high = figure
    return f"{value:.3f} ({low:.3f}, {high:.3f})"


def decoders() -> str:
    """Return the table of mixtures of experts and hybrids beside llama.cpp and onnxruntime-genai."""
    rows = []
    for isa in ISAS:
        found = load(f"decoders-{isa}")
        for what, r in found.items():
            if not isinstance(r, dict) or "tokens_per_second" not in r:
                continue
            name, _, kind = what.partition(", ")
            speed, goal = r["tokens_per_second"], r.get("goal")
            layers = str(found["layers"][name])
            sides = [f"{speed[side]:g}" if side in speed else "" for side in ("kvexport", *PEERS)]
            ratios = [f"{r[f'over_{peer}']:.2f}" if peer in speed else "" for peer in PEERS]
            rows.append((name, layers, isa, kind, *sides, *ratios, f"{goal:g}" if goal else ""))
    peers = ("llama.cpp", "genai", "ratio to llama.cpp", "ratio to genai")
    header = ("layers of", "layers", "instruction set", "tokens", "kvexport", *peers, "goal")
    return table(header, *rows)


def _row(name: str, result: dict[str, Any]) -> tuple[str, str]:
    reason = result["reason"].replace("|", "\\|").replace("<", "&lt;")
    return f"`{name}`", reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} ..."

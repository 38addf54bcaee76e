"""Tables of docs/measurements/decoder-types.md, from the results of `decoder_types.py`."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from table_parts import load, table

MEANING = {
    "equal": "every logit is within 1e-4 of the largest logit, and the most likely next tokens are equal",
    "refused": "the build stops with a reason, before it reads a weight",
    "no text": "transformers does not run the model on tokens alone",
    "not made": "transformers cannot make the tiny model of this page here",
    "different": "a logit differs by more, without an error",
    "leaked": "the build ends with an exception of torch or transformers, without a reason of kvexport",
}
LONGEST = 200  # characters of a reason


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
    }


def _row(name: str, result: dict[str, Any]) -> tuple[str, str]:
    reason = result["reason"].replace("|", "\\|").replace("<", "&lt;")
    return f"`{name}`", reason if len(reason) <= LONGEST else f"{reason[:LONGEST]} ..."

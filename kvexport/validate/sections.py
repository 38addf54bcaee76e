"""The report of a validation (comparison of an exported model with PyTorch): tables and figures."""

from collections import Counter
from typing import Any

from kvexport.report import KeyValues, Paragraph, Section, Table
from kvexport.validate.result import ABOVE, KINDS, OUTLIERS, ROUNDING_RATIO, ValidationResult

# Random tokens have no structure that a compressed cache could keep, so their distance says nothing about text.
RANDOM_NOTE = " (no criterion: every bounded cache is far from the full one on random tokens)"


def sections(result: ValidationResult) -> list[Section]:
    sections: list[Section] = [KeyValues("Validation", summary(result)), _largest(result)]
    if result.mismatches:
        rows = [
            (m.layer, m.step, m.phase, m.tensor, m.lane, m.head, m.slot, m.largest, m.allowed)
            for m in result.mismatches
        ]
        heads = ("layer", "call", "phase", "tensor", "lane", "head", "slot or token", "difference", "allowed")
        sections.append(Table(f"Differences, the first {len(rows)} of {result.mismatched}", heads, rows))
    if result.flips:
        names = ("layer", "step", "lane", "head", "slot", "tensor", "difference", "roundings")
        note = (
            "Heads whose merge selects other entries than PyTorch's. Roundings: random error of every operation "
            "(in float32 roundings) with which float64 makes the engine's selection (0: without any error)."
        )
        flips = [tuple(flip[name] for name in names) for flip in result.flips]
        sections.append(Table("Ties that rounding decides", names, flips, note))
    if result.rounding:
        sections.append(_rounding(result))
    if not any(map(bool, result.kl)):
        sections.append(Paragraph("No position lies past the smallest budget: the cache compressed nothing."))
    return sections


def summary(result: ValidationResult) -> dict[str, Any]:
    calls = ", ".join(f"{n} {phase}" for phase, n in Counter(s["phase"] for s in result.steps).items())
    budgets = sorted(set(result.budgets)) or [0]
    distances = {
        f"KL(full cache || engine), {kind}": f"{result.mean_kl(kind):.4g} nats, top token the same at "
        f"{result.agreement(kind):.1%}{RANDOM_NOTE if kind == 'random' else ''}"
        for kind in dict.fromkeys(result.texts)
        if any(kl for kl, text in zip(result.kl, result.texts, strict=False) if text == kind)
    }
    if (losses := result.losses_of_text) is not None:
        distances["loss of the next token, text"] = "{:.4g} nats with the full cache, {:.4g} with the engine".format(
            *losses
        )
    if result.warning:
        distances["warning"] = result.warning
    unmerged = (
        f"{result.unmerged} of {len(result.budgets)} KV heads have budgets of {max(result.tokens)} slots or "
        "more, and merged nothing; --length N with a longer sequence compares their merges too"
    )
    no_image = (
        f"not compared: the picture takes {result.no_image} tokens; --length {2 * result.no_image} has room for it"
    )
    return {
        "result": "passed" if result.passed else f"FAILED: {'; '.join(result.problems)}",
        "artifact": result.artifact,
        **_layers(result),
        "engine": result.backend,
        **result.operators,
        "reference": "PyTorch, from the same state at every step",
        "tokens per sequence": ", ".join(f"{n} ({kind})" for n, kind in zip(result.tokens, result.texts, strict=True)),
        "budget, slots of a KV head": budgets[0] if len(budgets) == 1 else f"{budgets[0]} to {budgets[-1]}",
        "calls compared": f"{len(result.steps)} ({calls})",
        **({"merges not compared": unmerged} if result.unmerged else {}),
        **({"images": no_image} if result.no_image else {}),
        "head-merges that differ from PyTorch's by a tie": f"{len(result.flips)} of {result.head_merges}",
        "in-place buffers": "bit-identical" if result.in_place_identical else "DIFFERS",
        **({} if result.top_logits_hold is None else {"top logits": "right" if result.top_logits_hold else "WRONG"}),
        **({} if result.shipped_difference is None else {"CUDA graphs": result.shipped_difference or "equal answers"}),
        "independent run": f"KL {result.own_kl:.2g} nats from PyTorch's over {result.own_compared} tokens, allowed "
        f"{result.own_kl_allowed:.3g}{_parted(result)}",
        "before anything was evicted": f"KL {result.first_kl:.2g} nats from transformers' own attention, cache and "
        f"positions over {result.first_compared} tokens, allowed {result.own_kl_allowed:.3g}"
        if result.first_compared
        else "not compared",
        **distances,
        "time": f"{result.seconds:.0f} s",
    }


def _parted(result: ValidationResult) -> str:
    lanes = ", ".join(f"lane {lane} after {', '.join(map(str, tokens))}" for lane, tokens in result.parted.items())
    return (
        f"; ties that rounding decides, by tokens: {lanes}; PyTorch goes on from the engine's caches" if lanes else ""
    )


def _layers(result: ValidationResult) -> dict[str, str]:
    if result.layers is None:
        return {}
    compared, total = result.layers
    return {
        "layers": f"the first {compared} of {total}, built for this validation with the artifact's recipe and "
        "budgets; the other layers were not compared"
    }


def _largest(result: ValidationResult) -> Section:
    kinds = list(dict.fromkeys(kind for s in result.steps for kind in s["largest"]))
    phases = list(dict.fromkeys(s["phase"] for s in result.steps))

    def of(kind: str, phase: str) -> float | None:
        sizes = [s["largest"][kind] for s in result.steps if s["phase"] == phase and kind in s["largest"]]
        return max(sizes, default=None)

    rows = [(kind, *(of(kind, phase) for phase in phases)) for kind in kinds]
    allowed = ", ".join(f"{name} {size:g}" for name, size in result.tolerance.items())
    note = f"Every layer begins with PyTorch's hidden state. Vectors relative to their norm. Allowed: {allowed}; "
    note += "positions and lengths exactly."
    return Table("Largest difference", ("tensor", *phases), rows, note)


def _rounding(result: ValidationResult) -> Section:
    rows = [
        (
            r.phase,
            KINDS[r.tensor],
            r.count,
            *(getattr(side, name) for side in (r.engine, r.pytorch) for name in ("median", "p99", "largest")),
            r.ratio,
        )
        for r in result.rounding
    ]
    sides = ("engine, median", "99 %", "largest", "PyTorch, median", "99 %", "largest")
    heads = ("phase", "vectors", "errors", *sides, "ratio")
    note = "Relative to the vector's norm, over the whole depth of the model, from the same state. Ratio: of the 99th "
    note += f"percentiles, of fewer than 1,000 errors that of the quantiles that {ABOVE} errors exceed (the median at "
    note += f"the least); {ROUNDING_RATIO:g} is allowed, and {OUTLIERS * ROUNDING_RATIO:g} at the 99th percentile."
    return Table("Errors against float64", heads, rows, note)

"""The figure of README.md: time per token and memory of the cache by text length, beside the full cache.

`tables.py` writes it to docs/_static/length.svg from the results of `quantized.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from table_parts import ROOT, load

FILE = ROOT / "docs" / "_static" / "length.svg"
# SmolLM2-135M has 30 layers of 3 KV heads of 64; the cache is float32, with 512 slots and a slack of one chunk.
HEADS, ROW, SLOTS, CHUNK = 30 * 3, 2 * 64 * 4, 512, 128
SLOT = ROW + 3 * 4  # bytes of keys and values, and of votes, one score and the position
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 340, 250, 52, 44, 40
COLOURS = {"full cache": "#dc2626", "512 slots": "#2563eb"}


class Panel(NamedTuple):
    """One plot: its title, the points of each line, and the ticks of its vertical axis."""

    title: str
    lines: dict[str, list[tuple[float, float]]]
    ticks: Sequence[float]


def figure() -> str:
    """Return the figure as SVG."""
    results = load("quantized-smollm2-int4-epyc")
    rows = {key: row for key, row in results.items() if key.startswith("decode ")}
    decode = {int(key.split()[1]): row["tokens_per_second"] for key, row in rows.items()}
    lengths = sorted(decode)
    sides = {"full cache": "full", "512 slots": "keepkv"}
    times = {name: [(n, 1000 / decode[n][side]) for n in lengths] for name, side in sides.items()}
    grid = [0, SLOTS + CHUNK, *lengths[1:]]
    slots = {"full cache": lambda n: n, "512 slots": lambda n: min(n, SLOTS + CHUNK)}
    sizes = {name: [(n, HEADS * SLOT * count(n) / 1e6) for n in grid] for name, count in slots.items()}
    panels = (
        Panel("Milliseconds per token", times, _ticks(times)),
        Panel("Megabytes of the cache of one sequence", sizes, _ticks(sizes)),
    )
    machine = f"{results['machine']['cores']} cores, {results['machine']['cpu']}, {results['date']}"
    note = f"SmolLM2-135M with 4-bit weights, KeepKV with 512 slots; {machine}"
    width = WIDTH * len(panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT + 22}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12">',
            "<title>Time per token and memory of the cache over the length of the text</title>",
            f'<rect width="{width}" height="{HEIGHT + 22}" fill="#ffffff"/>',
            *(line for index, panel in enumerate(panels) for line in _panel(panel, index * WIDTH, lengths[-1])),
            f'<text x="10" y="{HEIGHT + 14}" font-size="11" fill="#6b7280">{note}</text>',
            "</svg>\n",
        ]
    )


def _ticks(lines: dict[str, list[tuple[float, float]]]) -> list[float]:
    """Return about five round numbers from 0 to above the largest value."""
    largest = max(y for points in lines.values() for _, y in points)
    step = next(s * 10**e for e in range(6) for s in (1, 2, 5) if s * 10**e * 5 >= largest)
    count = int(largest / step) + 1
    return [step * i for i in range(count + 1)]


def _panel(panel: Panel, left: float, longest: int) -> list[str]:
    x0, x1, y0, y1 = left + LEFT, left + WIDTH - 26, HEIGHT - BOTTOM, TOP

    def place(x: float, y: float) -> str:
        return f"{x0 + (x1 - x0) * x / 8192:.1f} {y0 + (y1 - y0) * y / panel.ticks[-1]:.1f}"

    parts = [f'<text x="{left + 10}" y="20" font-size="14" font-weight="bold" fill="#111827">{panel.title}</text>']
    for tick in panel.ticks:
        at = place(0, tick)
        parts.append(f'<path d="M{at}H{x1}" stroke="#e5e7eb"/>')
        parts.append(f'<text transform="translate({at})" x="-6" y="4" text-anchor="end" fill="#374151">{tick:g}</text>')
    for tokens in range(0, 8193, 2048):
        at = place(tokens, 0)
        parts.append(f'<text transform="translate({at})" y="18" text-anchor="middle" fill="#374151">{tokens:,}</text>')
    middle = (x0 + x1) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle" fill="#374151">tokens of text</text>')
    for name, points in panel.lines.items():
        path = "L".join(place(x, y) for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.5"/>')
        x, y = points[-1]
        above = -8 if x == longest else 0
        parts.append(
            f'<text transform="translate({place(x, y)})" y="{above}" text-anchor="end" font-weight="bold" '
            f'fill="{COLOURS[name]}">{name}</text>'
        )
    return parts

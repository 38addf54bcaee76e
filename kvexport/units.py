"""Amounts of memory and time as text, for people and from the command line."""

from __future__ import annotations

import re

from kvexport.errors import UsageError

DECIMAL = ("bytes", "kB", "MB", "GB", "TB", "PB", "EB")
_FACTORS = {
    "": 1,
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGTPE", 1)},
    **{f"{p}IB": 1024**i for i, p in enumerate("KMGTPE", 1)},
}


def format_bytes(count: int) -> str:
    """Format bytes with three digits and a unit in powers of 1000: 1234 -> "1.23 kB"."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < len(DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{count} bytes" if unit == 0 else f"{value:.3g} {DECIMAL[unit]}"


def format_seconds(seconds: float) -> str:
    """Format a duration as text: seconds below 100, minutes below 100, then hours. 150 -> "2.5 minutes"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.2g} minutes" if seconds < 5970 else f"{seconds / 3600:.2g} hours"


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: "24GB" (10^9), "24GiB" (2^30), "512 mb" or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([a-zA-Z]*)\s*", text, re.ASCII)
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise UsageError(
            f"{text!r} is not an amount of memory",
            "a number and kB, MB, GB, TB (powers of 1000) or KiB ... TiB, such as 24GB",
        )
    return int(float(match[1]) * factor)

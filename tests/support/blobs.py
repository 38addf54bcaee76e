"""Random changes of the bytes of snapshots."""

import copy
import hashlib
import json
from typing import Any

import numpy as np

FIXED = 8 + 4 + 4 + 32


def opened(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[12:16], "little")
    return json.loads(data[FIXED : FIXED + size]), data[FIXED + size :]


def signed(header: Any, payload: bytes) -> bytes:
    """Return a snapshot with this header and a matching digest of the header."""
    text = json.dumps(header).encode()
    fixed = b"kvexsnap" + (1).to_bytes(4, "little") + len(text).to_bytes(4, "little")
    return fixed + hashlib.sha256(text).digest() + text + payload


def mutated(data: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """Return the kind of a random change and the changed bytes. A "resigned" change comes with recomputed digests."""
    kind = ("flip", "flip", "cut", "insert", "swap", "zeros", "resigned header", "resigned tensor")[rng.integers(8)]
    at = int(rng.integers(len(data))) if rng.random() < 0.5 else int(rng.integers(min(len(data), 4096)))
    some = int(rng.integers(1, 64))
    if kind == "flip":
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        return kind, bytes(changed)
    if kind == "cut":
        return kind, data[:at] + (data[at + some :] if rng.random() < 0.5 else b"")
    if kind == "insert":
        return kind, data[:at] + rng.bytes(some) + data[at:]
    if kind == "swap":
        return kind, data[at:] + data[:at]
    if kind == "zeros":
        return kind, data[:at] + bytes(len(data[at : at + some])) + data[at + some :]
    header, payload = opened(data)
    if kind == "resigned header":
        _change(header, rng)
        return kind, signed(header, payload)
    return kind, _with_other_numbers(header, payload, rng)


def _change(header: dict[str, Any], rng: np.random.Generator) -> None:
    """Remove a random value of the header, or replace it by another."""
    strange = (None, -1, 0, 1, 2**63, 1e300, "", "past_key_values.0.key", [], {}, [[]], True, "\ud800", 10**30)
    place: Any = header
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            place.update(x=1) if isinstance(place, dict) else place.append(0)
            return
        key = keys[int(rng.integers(len(keys)))]
        if isinstance(place[key], (dict, list)) and rng.random() < 0.8:
            place = place[key]
            continue
        choice = rng.integers(3)
        if choice == 0:
            place.pop(key)
        elif choice == 1 and isinstance(place[key], int):
            place[key] += int(rng.integers(-3, 4))
        else:
            place[key] = copy.deepcopy(strange[int(rng.integers(len(strange)))])
        return


def _with_other_numbers(header: dict[str, Any], payload: bytes, rng: np.random.Generator) -> bytes:
    """Change up to 4 bytes of a random tensor, and recompute all digests."""
    changed, at = bytearray(payload), 0
    number = int(rng.integers(len(header["tensors"])))
    for i, entry in enumerate(header["tensors"]):
        size = int(np.dtype(entry["dtype"]).itemsize * np.prod(entry["shape"], dtype=int))
        if i == number and size:
            for place in rng.integers(size, size=4):
                changed[at + int(place)] = int(rng.integers(256))
            entry["sha256"] = hashlib.sha256(changed[at : at + size]).hexdigest()
        at += size
    return signed(header, bytes(changed))

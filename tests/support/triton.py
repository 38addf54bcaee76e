"""A reader of Triton's model configurations, and its sequence batcher over ONNX Runtime.

The batcher follows the documentation of implicit state in Triton. It uses none of Triton's code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

TYPES = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16, "TYPE_INT32": np.int32, "TYPE_INT64": np.int64}


def parsed(text: str) -> dict[str, list[Any]]:
    """Parse a protobuf message in text format into a list of values for each field."""
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    return _message(lines)


def _message(lines: Iterator[str]) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {}
    for line in lines:
        if line.strip() == "}":
            return fields
        if opened := re.fullmatch(r"\s*(\w+) \{", line):
            fields.setdefault(opened[1], []).append(_message(lines))
        else:
            name, value = re.fullmatch(r"\s*(\w+): (.+)", line).groups()  # type: ignore[union-attr]
            fields.setdefault(name, []).append(
                value if re.fullmatch(r"[A-Z_0-9]*[A-Z]\w*", value) else json.loads(value)
            )
    return fields


class SequenceBatcher:
    """Triton's sequence batcher with the strategy `oldest`.

    One batch has the waiting calls of several sequences, all of one shape. Input states and output states belong
    together by their places in two sorted lists. The states of a new sequence are zeros.
    """

    def __init__(self, model: Path) -> None:
        config = parsed((model / "config.pbtxt").read_text())
        self.session = ort.InferenceSession(model / "1" / "model.onnx", providers=["CPUExecutionProvider"])
        self.most = config["max_batch_size"][0]
        batching = config["sequence_batching"][0]
        self.sequences = batching["oldest"][0]["max_candidate_sequences"][0]
        states = batching["state"]
        self.pairs = list(
            zip(sorted(s["input_name"][0] for s in states), sorted(s["output_name"][0] for s in states), strict=True)
        )
        self.zeros = {}
        for state in states:
            first = state["initial_state"][0]
            assert first["zero_data"] == [True] and first["dims"] == state["dims"]
            self.zeros[state["input_name"][0]] = np.zeros(first["dims"], TYPES[first["data_type"][0]])
        names = {tensor["name"][0] for tensor in config["input"]} | self.zeros.keys()
        assert names == {value.name for value in self.session.get_inputs()}
        self.kept: dict[int, dict[str, Any]] = {}

    def call(self, batch: dict[int, list[int]], width: int) -> dict[int, np.ndarray[Any, Any]]:
        """Return the logits after the tokens of each sequence. The tokens are padded to `width`."""
        assert len(batch) <= self.most
        ids = np.array([[*tokens, *[0] * (width - len(tokens))] for tokens in batch.values()], np.int64)
        feeds = {"input_ids": ids, "query_length": np.array([[len(t)] for t in batch.values()], np.int64)}
        states = [self.kept.get(sequence, self.zeros) for sequence in batch]
        feeds |= {past: np.stack([state[past] for state in states]) for past, _ in self.pairs}
        logits, *presents = self.session.run(["logits", *(present for _, present in self.pairs)], feeds)
        for row, sequence in enumerate(batch):
            self.kept[sequence] = {past: value[row] for (past, _), value in zip(self.pairs, presents, strict=True)}
        return dict(zip(batch, logits[:, -1], strict=True))

"""The PyTorch reference computes with the values of packed weights, and holds a byte for each number."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from kvexport.export.hooks.experts import Layout
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.export.model.conversion import PLAIN
from kvexport.export.model.tensors import Source, dense_values
from kvexport.export.weights.quantize import Rounded
from kvexport.ops.packed import PackedFormat
from kvexport.tensor_files.shards import TensorEntry
from kvexport.validate import weights
from kvexport.validate.float64 import in_float64
from kvexport.validate.weights import PackedWeight, load_model
from tests.support import models

ROWS, INPUTS, EXPERTS = 96, 64, 4
FORMATS = [
    PackedFormat(4, True, 32),
    PackedFormat(4, False, 32, "zero"),
    PackedFormat(8, False, 32, "zero"),
    PackedFormat(8, True, 64),
]


@pytest.mark.parametrize("packing", FORMATS, ids=lambda packing: packing.label)
def test_functions_get_the_values_of_a_packed_weight(
    packing: PackedFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "BLOCK", 10 * INPUTS)
    torch.manual_seed(0)
    file = tmp_path / "weight"
    np.random.default_rng(0).standard_normal((ROWS, INPUTS), np.float32).tofile(file)
    entry = TensorEntry("weight", file, "F32", (ROWS, INPUTS), 0, 4 * ROWS * INPUTS)
    source: Source = Rounded(entry, packing, positive=False)
    values = torch.from_numpy(dense_values(source))
    weight = PackedWeight(source, torch.empty(ROWS, INPUTS, device="meta"), PLAIN)
    hidden, bias, ids = torch.randn(2, 3, INPUTS), torch.randn(ROWS), torch.randint(0, ROWS, (2, 5))
    exact = functional.linear(hidden.double(), values.double(), bias.double())
    assert torch.allclose(functional.linear(hidden, weight, bias), exact.float(), atol=1e-5)
    with in_float64():
        product = functional.linear(hidden, weight, bias)
    assert product.dtype == torch.float64 and torch.allclose(product, exact, atol=1e-13)
    assert torch.equal(functional.embedding(ids, weight), values[ids])
    assert torch.equal(weight.T, values.T) and weight.shape == values.shape and weight.device.type == "cpu"
    layout = Layout(transposed=True, interleaved=True)
    experts = layout.to_module(values.view(EXPERTS, -1, INPUTS))
    of_experts = PackedWeight(source, torch.empty(experts.shape, device="meta"), layout)
    assert torch.equal(of_experts[torch.tensor(2)], experts[2])
    assert torch.equal(of_experts + 0, experts)


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation of PyTorch returns."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


def test_packed_weights_are_dequantized_block_by_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model holds a byte for each number, and its calls make no array as large as its largest weight in float32."""
    monkeypatch.setattr(weights, "BLOCK", 1 << 16)
    sizes = {**models.SIZES, "hidden_size": 256, "vocab_size": 16384, "tie_word_embeddings": True}
    checkpoint = models.save_checkpoint(tmp_path / "checkpoint", LlamaConfig(**sizes))
    recipe = models.make_recipe(checkpoint, weights={"bits": 8, "group": 64}, limits={"max_length": 64})
    numbers = 256 * 16384  # of the embedding, which is also the head
    tracemalloc.start()
    try:
        model = load_model(read_checkpoint(checkpoint), recipe, "sdpa")
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with torch.no_grad(), Largest() as largest:
            logits = model(input_ids=torch.arange(8)[None]).logits
            with in_float64():
                exact = model(input_ids=torch.arange(8)[None]).logits
        called = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    assert exact.dtype == torch.float64 and float((logits - exact).abs().max() / exact.abs().max()) < 1e-5
    assert numbers < held < 1.5 * numbers
    assert called < numbers and 0 < largest.nbytes < 2 * numbers

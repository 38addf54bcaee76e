"""The PyTorch reference takes the memory of a packed weight's numbers, not of its values in float32 or float64."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.support import models

ROWS, SIZE = 98304, 256  # of the embedding, which is also the head
PROGRAM = """
import json, sys, torch
from pathlib import Path
from kvexport.export.hooks.attention import TokenLogits
from kvexport.export.model.checkpoint import read_checkpoint
from kvexport.validate.float64 import in_float64
from kvexport.validate.weights import load_model
from tests.support.models import make_recipe

def most():
    return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith("VmHWM"))

checkpoint = Path(sys.argv[1])
recipe, held = make_recipe(checkpoint, weights={"bits": 8, "group": 64}, limits={"max_length": 64}), {}
load_model(read_checkpoint(Path(sys.argv[2])), make_recipe(Path(sys.argv[2]), limits={"max_length": 64}), "sdpa")
ids = torch.arange(8)[None] * 1000
logits = []
with torch.no_grad():
    Path("/proc/self/clear_refs").write_text("5")  # the most memory begins anew
    before = most()
    for attention in ("eager", "sdpa"):
        model = load_model(read_checkpoint(checkpoint), recipe, attention, held)
        logits.append(model(input_ids=ids).logits[0, -1])
        with in_float64():
            logits.append(model(input_ids=ids).logits[0, -1])
far = [float((x - logits[1]).abs().max() / logits[1].abs().max()) for x in logits]
print(json.dumps([most() - before, [str(x.dtype) for x in logits], far]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_a_reference_of_packed_weights_takes_a_byte_for_each(tmp_path: Path) -> None:
    sizes = {**models.SIZES, "hidden_size": SIZE, "num_hidden_layers": 1, "tie_word_embeddings": True}
    large, small = (
        models.save_checkpoint(tmp_path / str(rows), LlamaConfig(**{**sizes, "vocab_size": rows}))
        for rows in (ROWS, 8192)
    )
    ran = subprocess.run([sys.executable, "-c", PROGRAM, large, small], capture_output=True, text=True, check=True)
    most, types, far = json.loads(ran.stdout)
    assert types == ["torch.float32", "torch.float64"] * 2
    assert far[0] < 1e-5 and far[2] < 1e-5 and far[3] < 1e-12
    assert most < 12 * ROWS * SIZE, "values in float32 take 4 bytes, and those in float64 8 more"

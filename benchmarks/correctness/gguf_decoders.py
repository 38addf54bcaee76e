"""Tiny random GGUF files of every decoder type of tests/support/gguf_decoders.py, read by llama.cpp.

    python benchmarks/correctness/gguf_decoders.py FOLDER [TYPE ...]

FOLDER has the package of llama.cpp (`pip install --target FOLDER xllamacpp`). For each type the script prints the
largest difference between the logarithms of the probabilities of the next token that llama.cpp and transformers give.
The files have float matrices, since llama.cpp rounds the inputs of quantized ones. A difference above 2e-3 is a
failure: llama.cpp looks GELU up in a table of 16 bits.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.support.gguf_decoders import CASES, text, write_decoder


def read_by_llama_cpp(packages: str, file: Path) -> Any:
    """Return the logarithms of the next token's probabilities behind `text()`."""
    sys.path.append(packages)
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(file)
    parameters.n_ctx, parameters.n_parallel, parameters.port, parameters.warmup = 512, 1, 0, False
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    answer = xllamacpp.Server(parameters).handle_completions({"prompt": text(), "n_predict": 1, "n_probs": 64})
    answer = json.loads(answer) if isinstance(answer, str) else answer
    tokens = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return {token["id"]: token["logprob"] for token in tokens}


def unbiased(x: torch.Tensor, *, std: Any = torch.std, **options: Any) -> torch.Tensor:
    """Return llama.cpp's standard deviation of Gemma 3n's activations, which divides by one less than their number.

    transformers divides by their number. In a model with 16,384 activations the two differ by 3e-5 of their size.
    """
    return std(x, **options | {"unbiased": True})


def main() -> int:
    packages, *kinds = sys.argv[1:]
    failed = 0
    for kind in kinds or CASES:
        with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("fork").Pool(1) as pool:
            file = Path(folder) / "tiny.gguf"
            model = write_decoder(kind, file, packed=False)
            for module in model.modules():
                if type(module).__name__ == "GELUActivation":  # llama.cpp's GELU is the approximation by tanh
                    module.act = partial(torch.nn.functional.gelu, approximate="tanh")
            with torch.no_grad(), mock.patch("torch.std", unbiased):
                expected = torch.log_softmax(model(torch.tensor([text()])).logits[0, -1], -1).numpy()
            given = pool.apply(read_by_llama_cpp, (packages, file))
        difference = max(abs(expected[i] - given.get(i, -np.inf)) for i in range(len(expected)))
        failed += not difference < 2e-3
        print(f"{kind:20} {difference:.1e}", flush=True)
    print(f"{len(kinds or CASES) - failed} of {len(kinds or CASES)} equal")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

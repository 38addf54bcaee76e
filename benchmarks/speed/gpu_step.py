"""Predicted time of a decode step of Llama-3.1-8B in 4 bits on GPUs; no GPU is needed, and no time is measured.

    python benchmarks/speed/gpu_step.py

A step reads all weights and the KV cache of every sequence, at 90 % of the published memory bandwidth times a share
that is known of the kernel:

    products    95 % of the ideal up to 32 rows, which MARLIN reaches on an A10 (arXiv 2408.11743, Figure 1). kvexport
                and TensorRT-LLM run the same kernels, which ONNX Runtime took over (`ep.cuda.fpa_intb_gemm`).
    without     ONNX Runtime's other kernel, as its developers measured it on an A100 (2,039 GB/s) with groups of 32
                (onnxruntime pull request 29451): matrices of 4096 x 12288 for layers, 4096 x 151936 for the head, at 1
                and 8 rows. Above 16 rows it writes the weights in 16 bits and multiplies these.
    attention   bytes / bandwidth + 3.7 us a layer (docs/measurements/cuda.md, Decode: splits)
    launches    190 of 2 us (docs/measurements/cuda.md, A step)

kvexport's cache has 1,638 slots, as in the recipe llama31-8b-keepkv, and on average half of 512 slots of slack; a full
cache has the 8,192 tokens of the sequence. Products of a step take at least their operations over 60 % of the published
rate. Writes benchmarks/results/gpu_step.json.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.common import options_of, save

LAYERS, HIDDEN, INNER, VOCABULARY, KV_HEADS, SIZE = 32, 4096, 14336, 128256, 8, 128
LAYER_WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * SIZE + 3 * INNER)
PACKED = (4 + 16 / 32) / 8  # bytes of a weight: 4 bits, and a scale of 16 bits for 32
HEAD = 1 + 2 / 32  # of the head, in 8 bits
SLOT = (
    2 * 2 * KV_HEADS * SIZE + 4 * KV_HEADS * 4
)  # key and value in 16 bits; votes, position and two numbers of a score
SLOTS, TOKENS = 1638 + 256, 8192
LATENCY, LAUNCHES, LAUNCH = 3.7e-6, 190, 2e-6
PROBED, A100 = 4096 * (0.5 + 2.5 / 32), 2.039e12  # bytes of a row of the measured matrices, which have zero points
MEASURED = {1: (37.5e-6, 300.7e-6), 8: (71.9e-6, 635.3e-6)}  # by rows: seconds with 12,288 and with 151,936 columns
BATCHES = (1, 8, 32)


class Gpu(NamedTuple):
    bandwidth: float  # bytes a second
    rate: float  # float16 operations of tensor cores a second, without sparsity
    memory: float


GPUS = {
    "H200": Gpu(4.8e12, 989e12, 141e9),
    "L40S": Gpu(0.864e12, 362e12, 48e9),
    "AGX Orin 64 GB": Gpu(0.2048e12, 42.5e12, 64e9),
}


def share(rows: int, column: int) -> float:
    """Return the share of the bandwidth at which MatMulNBits read packed weights on an A100."""
    return PROBED * (12288, 151936)[column] / MEASURED[rows][column] / A100


def products(gpu: Gpu, batch: int, *, fused: bool) -> float:
    """Return the seconds of the products of a step, by fused kernels or by MatMulNBits as it is."""
    layers, head = LAYERS * LAYER_WEIGHTS, HIDDEN * VOCABULARY
    least = 2 * batch * (layers + head) / (0.6 * gpu.rate)
    if fused:
        return max(least, (layers * PACKED + head * HEAD) / (0.95 * 0.9 * gpu.bandwidth))
    if batch in MEASURED:
        at = [share(batch, column) * gpu.bandwidth for column in (0, 1)]
        return max(least, layers * PACKED / at[0] + head * HEAD / at[1])
    packed = layers * PACKED + head * HEAD
    return least + (packed + 2 * 2 * (layers + head)) / (0.9 * gpu.bandwidth)


def attention(gpu: Gpu, batch: int, slots: int) -> float:
    return batch * LAYERS * slots * SLOT / (0.9 * gpu.bandwidth) + LAYERS * LATENCY


def main() -> None:
    options_of(__doc__).parse_args()
    rows = []
    for name, gpu in GPUS.items():
        for batch in BATCHES:
            held = LAYERS * LAYER_WEIGHTS * PACKED + HIDDEN * VOCABULARY * HEAD + batch * LAYERS * TOKENS * SLOT
            steps = {
                "kvexport": products(gpu, batch, fused=True) + attention(gpu, batch, SLOTS),
                "kvexport, not fused": products(gpu, batch, fused=False) + attention(gpu, batch, SLOTS),
                "full cache": products(gpu, batch, fused=True) + attention(gpu, batch, TOKENS),
            }
            ms = {label: round(1e3 * (seconds + LAUNCHES * LAUNCH), 2) for label, seconds in steps.items()}
            parts = {
                "products": round(1e3 * products(gpu, batch, fused=True), 2),
                "attention": round(1e3 * attention(gpu, batch, SLOTS), 2),
                "attention, full cache": round(1e3 * attention(gpu, batch, TOKENS), 2),
            }
            rows.append({"gpu": name, "batch": batch, "full cache fits": held < gpu.memory, "ms": ms, "parts": parts})
            print(f"{name} {batch}: {ms} {parts}")
    shares = {f"{rows}": [round(share(rows, column), 2) for column in (0, 1)] for rows in MEASURED}
    save("gpu_step", {"MatMulNBits, share of an A100's bandwidth, layer and head": shares, "rows": rows})


if __name__ == "__main__":
    main()

"""Checkpoints whose weights are quantized, layout by layout: which tensors are a packed weight, and what its numbers
are."""

"""Quantized checkpoints, layout by layout: the tensors that form a packed weight, and its numbers."""

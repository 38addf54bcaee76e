"""Readers of quantized checkpoints, one module per layout: the tensors that form a packed weight, and its numbers."""

"""Readers of quantized checkpoints, one module for each layout."""

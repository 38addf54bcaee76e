"""Readers of checkpoints, and the model of transformers without its weights."""

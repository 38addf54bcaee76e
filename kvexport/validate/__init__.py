"""Proof that an engine and its PyTorch reference agree."""

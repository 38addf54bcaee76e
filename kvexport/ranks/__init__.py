"""Ranks: processes that compute one model together, each with its KV heads (docs/tasks/tensor-parallel.md)."""

"""Tensor parallelism: ranks, processes that compute one model together, each with some of its KV heads."""

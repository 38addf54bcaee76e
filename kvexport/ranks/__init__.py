"""A model that several processes compute together, each with some KV heads (docs/tasks/tensor-parallel.md)."""

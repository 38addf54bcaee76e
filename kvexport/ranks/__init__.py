"""A model that several processes compute together, each with its share of the KV heads (docs/tensor-parallel.md)."""

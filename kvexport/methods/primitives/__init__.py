"""The rules for evictions and merges that a `MergePolicy` can name, defined in PyTorch."""

"""The meaning of the fields of `MergePolicy` in PyTorch; methods without a policy use the same functions."""

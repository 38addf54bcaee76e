"""The rules that a `MergePolicy` can name, defined in PyTorch; methods without a policy use the same functions."""

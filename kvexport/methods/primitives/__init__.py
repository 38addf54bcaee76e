"""What the fields of a `MergePolicy` mean, in PyTorch; methods without a policy use the same parts."""

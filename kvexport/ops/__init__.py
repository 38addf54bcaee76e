"""The meaning of the operators VoteAttention and MergeCache in PyTorch, and the ONNX functions traced from it."""

"""The operators VoteAttention and MergeCache defined in PyTorch, and the ONNX functions traced from the definitions."""

"""The two operators: their meaning in PyTorch, and the ONNX functions derived from it."""

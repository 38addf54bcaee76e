"""Validation of an exported model: comparison of its ONNX graphs with a PyTorch reference."""

"""ONNX Runtime, on its CPU and CUDA providers."""

"""Running an artifact: ONNX Runtime and numpy only."""

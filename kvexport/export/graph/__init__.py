"""The trace of a model, and the ONNX graphs of an artifact that are made from the trace."""

"""The export of a model from a Hugging Face checkpoint to ONNX graphs and weight files."""

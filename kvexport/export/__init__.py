"""From a Hugging Face checkpoint to ONNX graphs."""

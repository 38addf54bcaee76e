"""The backend that runs exported models on ONNX Runtime's CPU and CUDA providers."""

"""The backend of TensorRT: engines that are built from an artifact's ONNX graphs, and their execution."""

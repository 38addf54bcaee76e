"""TensorRT: engines built from an artifact's graphs, and their runtime."""

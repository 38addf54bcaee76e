"""Builds, proves and measures the CUDA kernels on the GPU that is there: see `__main__`."""

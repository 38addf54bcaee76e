"""Builds, tests and measures the CUDA kernels on this machine's GPU; `__main__` describes the command."""

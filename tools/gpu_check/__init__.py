"""Build, tests and measurements of the CUDA kernels on this machine's GPU; `__main__` describes the command."""

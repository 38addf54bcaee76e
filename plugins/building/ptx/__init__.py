"""Translates the PTX of the CUDA kernels to C++ that runs on the host.

`read` parses PTX, `instructions` and `translate` write C++, `library` compiles it and links it with the runtime in
plugins/tests/ptx. Only the instructions that nvcc generates for these kernels are supported; any other one is an error
that names it.
"""

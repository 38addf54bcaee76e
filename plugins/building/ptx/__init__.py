"""Translation of the CUDA kernels' PTX to C++ that runs on the host.

`read` parses PTX, `instructions` and `translate` write C++, `library` compiles it and links it with the runtime in
plugins/tests/ptx, and `trips` counts round trips to memory. Only the instructions that nvcc generates for these kernels
are supported. Any other one is an error that names it.
"""

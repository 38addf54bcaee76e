"""PTX of the CUDA kernels as C++ that runs on the host: `read` takes PTX apart, `instructions` and `translate` write
C++, `library` compiles and links it with the runtime in plugins/tests/ptx. Only the instructions that nvcc makes of
these kernels are known; any other is an error that names it."""

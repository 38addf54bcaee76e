"""What plugins/build.py does: `targets` lists what can be built, `make` compiles and links it, `headers` finds what
others' headers it takes, `resources` reads what nvcc says of the kernels. Needs Python alone."""

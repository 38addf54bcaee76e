"""The modules of plugins/build.py.

`targets` lists the targets, `make` compiles and links them, `headers` finds the headers of other projects, and
`resources` reads nvcc's report on the kernels. The package needs only Python.
"""

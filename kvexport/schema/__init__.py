"""The operators' schema: state tensors, operators, attributes and the merge policy, each fact once.

It imports nothing: what it says becomes ONNX signatures, C structs, attribute readers and tables of the documents.
"""

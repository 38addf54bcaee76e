"""The schema of the ONNX operators: state tensors, operators, attributes and the merge policy, each defined once.

ONNX signatures, C structs, readers of attributes and tables of the documentation are generated from the schema. The
schema imports no other part of kvexport.
"""

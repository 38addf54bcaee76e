"""Which nodes of a traced decoder become a Linear (`kvexport.ops.linear`): only where the shapes in the ONNX graph
leave no doubt of it."""

"""The nodes of a traced decoder that become a Linear (`kvexport.ops.linear`), if the shapes in the graph prove it."""

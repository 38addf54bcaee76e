"""Graph passes that turn nodes of a traced decoder into Linear nodes, if the shapes in the graph prove it possible.

Linear (`kvexport.ops.linear`) is kvexport's operator of one or more matrix products with norm, bias, gate, residual and
rotary embedding.
"""

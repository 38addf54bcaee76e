"""Functions registered with transformers, to which a decoder's layers hand their attention and their experts."""

"""Functions registered with transformers that compute the attention and the experts of a decoder's layers."""

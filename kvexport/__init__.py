"""kvexport: a Hugging Face checkpoint becomes an engine whose KV cache has a fixed budget."""

__version__ = "0.1.0"

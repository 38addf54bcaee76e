"""Hooks into transformers: where a decoder's layers hand their computation to kvexport."""

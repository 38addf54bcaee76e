"""The checkpoint, and the model of transformers without its weights."""

"""The checkpoint, and the model without its weights."""

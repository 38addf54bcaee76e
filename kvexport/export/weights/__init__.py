"""Copying, casting and rounding of weights: from a checkpoint's tensors to the weight files of an artifact."""

"""The path of weights from a checkpoint's tensors to the files of an artifact."""

"""Files of tensors in the safetensors format: their headers, the tensors' values, and LoRA adapters.

The export reads checkpoints with these modules, and the engine reads adapters. The modules need numpy alone.
"""

"""Calibration: cache budgets of layers or KV heads for a recipe, measured with a checkpoint on texts."""

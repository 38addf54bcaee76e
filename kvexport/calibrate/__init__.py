"""Calibration: from a checkpoint and texts to the budgets of a recipe."""

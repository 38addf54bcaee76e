"""Calibration: budgets of KV-cache slots for layers or KV heads, measured with a checkpoint on texts."""

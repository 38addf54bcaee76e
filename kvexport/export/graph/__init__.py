"""Tracing a model to the graphs of an artifact."""

"""Backends: what runs the graphs of an artifact."""

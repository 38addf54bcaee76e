"""Artifacts: what is built, and how it is staged, digested and loaded."""

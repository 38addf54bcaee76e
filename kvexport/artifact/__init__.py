"""Artifacts: what one holds, its digests, and how it is published."""

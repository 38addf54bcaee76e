"""Artifacts: their manifest, their digests, and their publication."""

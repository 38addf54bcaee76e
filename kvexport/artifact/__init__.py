"""Artifacts (folders with a built model): their manifest, their digests, and their publication."""

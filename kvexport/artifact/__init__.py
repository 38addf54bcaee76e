"""Artifacts (built models): their manifest, their digests, and their publication."""

"""Artifacts (folders with an exported model): their manifest, the hashes of their files, and how they are written."""

"""State of sequences that outlives an engine step: snapshots, stored sessions, full caches of periodic decoding."""

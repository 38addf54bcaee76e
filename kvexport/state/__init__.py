"""State that outlives a step: snapshots, sessions, and the full cache behind periodic decoding."""

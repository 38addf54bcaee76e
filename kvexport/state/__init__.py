"""State of sequences that outlives an engine step.

It consists of snapshots, stored sessions, and the full KV caches in host memory from which periodic decoding copies its
slots to the device.
"""

"""Latency and throughput of an artifact, measured in this process."""

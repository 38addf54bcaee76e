"""Measurements of the latency and throughput of an artifact, in this process."""

"""Measurements of the latency and throughput of an artifact, in the process that calls them."""

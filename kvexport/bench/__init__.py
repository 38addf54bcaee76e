"""Latency and throughput: of an artifact in this process, and of any server that speaks OpenAI's API."""

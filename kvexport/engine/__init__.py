"""The inference engine: requests, the scheduler, batch lanes with their KV caches, and the model calls of one step."""

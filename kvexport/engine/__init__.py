"""The engine: requests, the scheduler, lanes, and the calls of one step."""

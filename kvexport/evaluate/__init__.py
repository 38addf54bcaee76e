"""`kvexport eval`: quality of compressed KV caches at equal memory, on generated tasks such as recall and text."""

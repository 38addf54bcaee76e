"""`kvexport eval`: quality of compressed KV caches at equal memory, on texts and on RULER."""

"""An engine behind HTTP, with the APIs that clients already use. Needs the extra `serve`, not torch or transformers."""

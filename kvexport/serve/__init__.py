"""An engine behind HTTP: the APIs that clients already speak. Needs the extra `serve`; neither torch nor
transformers."""

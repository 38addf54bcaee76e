"""The HTTP server of an inference engine, with the APIs of OpenAI, Anthropic and vLLM. Needs the extra `serve`."""

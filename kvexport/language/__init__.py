"""Tokens and words: tokenizer, chat templates, tools, grammars and sampling."""

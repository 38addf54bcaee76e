"""Everything about text: tokenizer, chat templates, tool calls, grammars and sampling."""

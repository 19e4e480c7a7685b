"""Tool calls and reasoning in the text of an answer: parsers by model family, and grammars that enforce calls. Pure."""

"""Text to tokens and back: tokenizer, detokenizer, and the encoding of growing chats."""

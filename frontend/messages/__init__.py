"""`/v1/messages`: Anthropic's Messages API over the same answers as chat."""

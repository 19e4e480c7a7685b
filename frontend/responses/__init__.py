"""`/v1/responses`: OpenAI's Responses API over the same answers as chat."""

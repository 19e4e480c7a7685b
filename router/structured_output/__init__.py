"""Structured output at the edge: what a request asks its output to match becomes a grammar that a worker can take."""

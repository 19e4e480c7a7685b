"""Structured output at the edge: turns the form that a request asks for into a grammar that a worker can use."""

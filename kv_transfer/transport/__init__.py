"""Transports: they move bytes between pools. Their callers decide who may write which blocks."""

"""Relaying: bodies, connections to engines, streams and retries. Any number of processes do this."""

"""Deciding: which engines there are, what state they are in, and where a request goes. One process does this."""

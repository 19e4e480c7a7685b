"""Deciding: which engines there are, how they are, and where a request goes. One process does this."""

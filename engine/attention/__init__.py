"""Paged attention: one interface towards transformers, one backend per kind of device."""

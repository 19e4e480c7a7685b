"""Drafts: tokens that probably come next, found in existing text, and how many of them a step checks."""

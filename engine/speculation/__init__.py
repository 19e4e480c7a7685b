"""Drafts: tokens that probably come next, found in text that is there already, and how many of them a step checks."""

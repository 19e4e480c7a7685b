"""API keys: the file that keeps them, what a process knows about them, and how it follows the file."""

"""API keys: the file that keeps them, what a process knows of them, and how it follows the file."""

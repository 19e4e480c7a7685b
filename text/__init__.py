"""Text to tokens and back, tool calls in texts, and constraints on them. No HTTP, no workers, no model."""

if __name__ != "tandem.text":
    raise ImportError("import tandem.text: tandem is the one import root")

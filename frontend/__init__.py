"""What clients talk to: HTTP, the three APIs, the relay to other engines, API keys, the dashboard, router processes."""

if __name__ != "tandem.frontend":
    raise ImportError("import tandem.frontend: tandem is the one import root")

"""The I/O shell in front of workers: HTTP, admission queue, dispatch. Decisions are made in `scheduling/`."""

if __name__ != "tandem.router":
    raise ImportError("import tandem.router: tandem is the one import root")

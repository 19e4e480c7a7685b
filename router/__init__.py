"""The I/O shell in front of workers: admission queue, our workers, other engines. Decisions are made in `scheduling/`."""

if __name__ != "tandem.router":
    raise ImportError("import tandem.router: tandem is the one import root")

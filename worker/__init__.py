"""One worker process: the loop around an engine and both roles, its sockets, and the KV kept beyond its pool."""

if __name__ != "tandem.worker":
    raise ImportError("import tandem.worker: tandem is the one import root")

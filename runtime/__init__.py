"""What every process runs on: sockets and their keys, signals, background tasks, timeouts, garbage collection."""

if __name__ != "tandem.runtime":
    raise ImportError("import tandem.runtime: tandem is the one import root")

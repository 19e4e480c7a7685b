"""Starts and supervises processes: Ray actors of workers, the supervisor, router processes, the model store."""

if __name__ != "tandem.cluster":
    raise ImportError("import tandem.cluster: tandem is the one import root")

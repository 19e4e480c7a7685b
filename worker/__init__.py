if __name__ != "tandem.worker":
    raise ImportError("import tandem.worker: tandem is the one import root")

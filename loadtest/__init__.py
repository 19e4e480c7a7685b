if __name__ != "tandem.loadtest":
    raise ImportError("import tandem.loadtest: tandem is the one import root")

if __name__ != "tandem.scheduling":
    raise ImportError("import tandem.scheduling: tandem is the one import root")

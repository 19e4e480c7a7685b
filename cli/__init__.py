if __name__ != "tandem.cli":
    raise ImportError("import tandem.cli: tandem is the one import root")

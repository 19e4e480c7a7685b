if __name__ != "tandem.runtime":
    raise ImportError("import tandem.runtime: tandem is the one import root")

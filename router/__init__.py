if __name__ != "tandem.router":
    raise ImportError("import tandem.router: tandem is the one import root")

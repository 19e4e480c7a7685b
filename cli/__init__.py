"""The `tandem` command: parse flags and files into a configuration, then start, measure or chat."""

if __name__ != "tandem.cli":
    raise ImportError("import tandem.cli: tandem is the one import root")

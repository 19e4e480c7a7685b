"""What crosses a process: messages, sampling parameters, block digests, configuration, errors. No torch."""

if __name__ != "tandem.protocol":
    raise ImportError("import tandem.protocol: tandem is the one import root")

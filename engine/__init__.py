"""The paged engine: sequences, block pool, prefix cache, scheduler, model runner. It knows only token ids.

It knows neither HTTP nor Ray nor transports.
"""

if __name__ != "tandem.engine":
    raise ImportError("import tandem.engine: tandem is the one import root")

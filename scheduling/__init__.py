"""Pure decisions over plain values and a clock: cost model, placement, admission, cache sizing, autoscaling. No I/O."""

if __name__ != "tandem.scheduling":
    raise ImportError("import tandem.scheduling: tandem is the one import root")

"""Virtual-time replay of traces through the product's own placement: what a policy would do on a cluster one lacks."""

if __name__ != "tandem.simulator":
    raise ImportError("import tandem.simulator: tandem is the one import root")

"""Worker processes and their Ray actors, pools, autoscaler and the launcher."""

if __name__ != "tandem.cluster":
    raise ImportError("import tandem.cluster: tandem is the one import root")

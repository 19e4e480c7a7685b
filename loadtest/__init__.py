"""Load for any OpenAI-compatible server: a measuring client, closed-loop load, a locust file, trace readers."""

if __name__ != "tandem.loadtest":
    raise ImportError("import tandem.loadtest: tandem is the one import root")

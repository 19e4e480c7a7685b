"""The decode role: receive prompts' KV and decode."""

if __name__ != "tandem.decode_worker":
    raise ImportError("import tandem.decode_worker: tandem is the one import root")

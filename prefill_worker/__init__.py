"""The prefill role: compute prompts and hand their KV over."""

if __name__ != "tandem.prefill_worker":
    raise ImportError("import tandem.prefill_worker: tandem is the one import root")

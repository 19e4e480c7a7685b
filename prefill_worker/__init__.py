"""The prefill role: compute prompts and hand their KV over."""

from tandem.prefill_worker.role import PrefillRole

if __name__ != "tandem.prefill_worker":
    raise ImportError("import tandem.prefill_worker: tandem is the one import root")

__all__ = ["PrefillRole"]

"""The prefill role: compute prompts and hand their KV over."""

from prefill_worker.role import PrefillRole

__all__ = ["PrefillRole"]

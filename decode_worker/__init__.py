"""The decode role: receive prompts' KV and decode."""

from decode_worker.role import DecodeRole

__all__ = ["DecodeRole"]

"""Waits for work launched on a device: the only module that knows that GPUs run behind their caller."""

from __future__ import annotations

import torch

__all__ = ["DeviceQueue"]


class DeviceQueue:
    """Work that was launched on a device and may still run. On a CPU every call is done when it returns.

    NOTE: code that lets the device touch blocks of the pool (a step, a load, a copy for a tier) waits before it
    returns. So the rest of the worker's loop may publish, store, grant and free blocks as the pool's books say.
    Transports read and write them without regard to the device's own order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Return once the results of all launched work are in memory. After a read of logits nothing is left."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

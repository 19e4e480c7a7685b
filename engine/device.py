"""When work that was launched on a device is done: the one place that knows of GPUs that run behind their caller."""

from __future__ import annotations

import torch

__all__ = ["DeviceQueue"]


class DeviceQueue:
    """What was launched on a device and may still run. On a CPU everything is done when its call returns.

    NOTE: whoever lets the device touch blocks of the pool (a step, a load, a copy for a tier) waits before it returns.
    So whatever else the worker's loop does finds them as the books say: they may be published, offered, granted to
    peers and freed. Transports read and write them past the device's own order.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        """Return once everything launched so far is in memory. Nothing is left to wait for where logits were read."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

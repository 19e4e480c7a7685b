"""The learned cost of loading cached blocks from one source: a tier or a peer."""

from __future__ import annotations

import math

from tandem.protocol.load_prior import LoadPrior

_MIN_BLOCK_S = 1e-7


class LoadCost:
    """Latency and seconds per block of loads from one source, learned.

    Each load moves the estimate half way to the measurement, on a logarithmic scale: a source's speed changes by
    factors when others begin or stop using it.
    """

    def __init__(self, prior: LoadPrior, block_bytes: int) -> None:
        self.latency_s = prior.latency_s
        self.block_s = block_bytes / prior.bytes_per_s
        self.probed_at = -math.inf  # last trial of a source that is not worth using

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from the duration of a load without its latency."""
        self.block_s = math.sqrt(self.block_s * max(seconds / num_blocks, _MIN_BLOCK_S))

    def observe_latency(self, seconds: float) -> None:
        """Learn from the time that passed before a load began."""
        self.latency_s = math.sqrt(self.latency_s * max(seconds, _MIN_BLOCK_S))

    def observe_at_least(self, num_blocks: int, seconds: float) -> None:
        """Learn from a load that was given up: it would have taken longer than this.

        The estimate at least doubles. Otherwise a prompt whose loads are overtaken by computing would plan them again.
        """
        self.block_s = max(2 * self.block_s, seconds / num_blocks)

"""A device that finishes its work late: until the engine waits for it, the memory it writes is garbage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.engine.device import DeviceQueue
from tandem.engine.engine import Engine
from tandem.engine.sequence import ScheduledChunk
from tandem.kv_transfer.codec import Codec

GARBAGE = 12345.0


class LateDevice(DeviceQueue):
    """Replaces an engine's device queue. Reading logits waits, as on a GPU, and work is done in order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.kv.device)
        self.num_late = 0  # steps, loads and copies that were not done when their call returned
        self._engine = engine
        self._run = engine.runner.run
        self._pending: list[Callable[[], None]] = []
        engine.device_queue = self
        engine.runner.run = self._run_late  # type: ignore[method-assign]

    @property
    def is_done(self) -> bool:
        return not self._pending

    def wait(self) -> None:
        for finish in self._pending:
            finish()
        self._pending.clear()

    def make_late(self, codec: Codec) -> None:
        """Make this codec move its bytes late."""
        scatter, gather = codec.scatter, codec.gather

        def scatter_late(source: Tensor, kv: Tensor, blocks: Tensor) -> None:
            kv[blocks] = GARBAGE
            self._defer(lambda: scatter(source, kv, blocks))

        def gather_late(kv: Tensor, blocks: Tensor, out: Tensor) -> None:
            out.fill_(255)
            self._defer(lambda: gather(kv, blocks, out))

        codec.scatter, codec.gather = scatter_late, gather_late  # type: ignore[method-assign,assignment]

    def _run_late(self, chunks: list[ScheduledChunk], *hooks: Callable[[], None]) -> Tensor | None:
        self.wait()
        logits = self._run(chunks, *hooks)
        if logits is None:
            self._hide([block for chunk in chunks for block in self._blocks_of(chunk)])
        return logits

    def _blocks_of(self, chunk: ScheduledChunk) -> Sequence[int]:
        size = self._engine.config.block_size
        return chunk.sequence.blocks[chunk.start // size : -(-(chunk.start + chunk.num_tokens) // size)]

    def _hide(self, blocks: list[int]) -> None:
        kv, index = self._engine.kv, torch.tensor(blocks)
        content = kv[index]
        kv[index] = GARBAGE
        self._defer(lambda: kv.__setitem__(index, content))

    def _defer(self, finish: Callable[[], None]) -> None:
        self.num_late += 1
        self._pending.append(finish)

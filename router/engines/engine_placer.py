"""Decides where a request goes: to the cheapest engine or pair of its model that may get requests now.

`Placer` makes the decision, as it does for our own workers. This module says which engines it may choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ModelNotFound, NoWorker
from tandem.protocol.messages import Role, WorkerState
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.errors import EngineBusy
from tandem.scheduling.cost_model import CostModel, Rows
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.placement.placer import Placer
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.worker_table import WorkerTable
from tandem.scheduling.workers.workers import RegisteredWorker

# Who is asked: ready engines, then also those that drain, and at last those whose circuit is open, which have failed.
_STEPS: tuple[dict[str, bool], ...] = ({}, {"falls_back": True}, {"falls_back": True, "is_last": True})


class ModelWorkers:
    """The engines of one model, taken from the registry of all engines."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._registry = registry
        self._model = model
        self._source: WorkerTable | None = None  # the registry's table that ours was made from
        self._table = WorkerTable([])
        self._rows: Rows = np.array([], dtype=np.intp)  # of our engines in the registry's table

    def __iter__(self) -> Iterator[RegisteredWorker]:
        return iter(self.table.workers)

    @property
    def queued_prompt_tokens(self) -> int:
        """Uncomputed prompt tokens booked on them."""
        return sum(worker.uncomputed_tokens for worker in self)

    @property
    def table(self) -> WorkerTable:
        """Their current state as arrays. It is rebuilt only when the registry's is: that takes 3 us per engine."""
        table = self._registry.table
        if table is not self._source:
            rows = [row for row, worker in enumerate(table.workers) if worker.card.model == self._model]
            self._source, self._rows = table, np.array(rows, dtype=np.intp)
            is_all = len(rows) == len(table)
            self._table = table if is_all else WorkerTable([table.workers[row] for row in rows])
        elif self._table is not table:
            self._table.update_from(table, self._rows)
        return self._table

    def get(self, worker_id: str) -> RegisteredWorker | None:
        """The engine, or None when it is gone or of another model."""
        worker = self._registry.get(worker_id)
        return worker if worker is not None and worker.card.model == self._model else None


class EnginePlacer(Placer):
    """Places the requests of one model, on one group of engines: KV is handed over within a group only."""

    def __init__(
        self,
        model: str,
        engines: Callable[[], Sequence[RemoteEngine]],
        workers: ModelWorkers,
        index: PrefixIndex,
        costs: CostModel,
        config: RouterConfig,
    ) -> None:
        """`engines` gives the engines of the fleet; `workers` are those of the model."""
        super().__init__(workers, index, costs, config)
        self._model = model
        self._engines = engines

    def place(self, request: PlacementRequest, now: float, *, tried: Collection[str] = (), **options: Any) -> Placement:
        """The cheapest engine or pair, without the engines in `tried`. `options` are those of `Placer.place`.

        Raises `ModelNotFound`, `EngineBusy` when engines ask to wait, and `NoWorker` with the reasons.
        """
        engines = [engine for engine in self._engines() if engine.spec.model == self._model]
        if not engines:
            raise ModelNotFound(f"The model '{self._model[:200]}' does not exist.", param="model")
        untried = [engine for engine in engines if engine.name not in tried and engine.card is not None]
        num_asked, error = -1, None
        for step in _STEPS:
            available = [engine for engine in untried if not engine.refusal(now, tenant=request.tenant, **step)]
            if len(available) == num_asked:
                continue
            try:
                return self._place_among(available, engines, request, now, tried, options)
            except NoWorker as exc:
                num_asked, error = len(available), exc
        assert error is not None, "at least those of the first step are asked"
        raise error

    def _place_among(
        self,
        available: list[RemoteEngine],
        engines: list[RemoteEngine],
        request: PlacementRequest,
        now: float,
        tried: Collection[str],
        options: dict[str, Any],
    ) -> Placement:
        decoders = [engine for engine in available if engine.spec.role is not Role.PREFILL]
        # A prompt that is too long for all engines is sent nevertheless: the engine's own 400 explains it best.
        num_prompt_tokens = max(1, min(request.num_prompt_tokens, max(map(_room, decoders), default=1) - 1))
        request = msgspec.structs.replace(request, num_prompt_tokens=num_prompt_tokens)
        found: list[Placement] = []
        refused: dict[str, NoWorker] = {}  # by group
        for group in dict.fromkeys(engine.spec.group for engine in decoders):
            members = {engine.name for engine in available if engine.spec.group == group}
            others = {worker.worker_id for worker in self._workers} - members
            try:
                _check_pair(request, decoders, group)
                found.append(super().place(request, now, excluded=others, **options))
            except NoWorker as exc:
                refused[group] = exc
        if not found:
            raise self._no_engine(engines, tried, now, request.tenant, refused)
        return max(found, key=lambda placement: (placement.rank, -placement.best.terms.total_s))

    def _no_engine(
        self,
        engines: list[RemoteEngine],
        tried: Collection[str],
        now: float,
        tenant: str,
        refused: dict[str, NoWorker],
    ) -> NoWorker | EngineBusy:
        reasons = {e.name: "tried" if e.name in tried else e.refusal(now, tenant=tenant) for e in engines}
        groups = dict.fromkeys(e.spec.group for e in engines if not reasons[e.name])
        text = f"no engine of {self._model} can take this request: " + "; ".join(
            [f"{name} ({reason})" for name, reason in reasons.items() if reason]
            + [str(refused.get(group, "the rest is prefill only")) for group in groups]
        )
        waits = [wait_s for e in engines if e.state is WorkerState.READY and (wait_s := e.busy_s(now, tenant))]
        return EngineBusy(text, retry_after_s=min(waits)) if waits else NoWorker(text)


def _check_pair(request: PlacementRequest, decoders: Sequence[RemoteEngine], group: str) -> None:
    """Raise `NoWorker` for a request that a pair cannot answer, where only pairs answer."""
    if request.can_hand_over or not request.generates:
        return
    if not any(engine.spec.group == group and engine.spec.serves_alone for engine in decoders):
        raise NoWorker("a pair of SGLang engines answers one prompt with one sequence: leave out n, echo and the like")


def _room(engine: RemoteEngine) -> int:
    """Tokens of the longest context for which it has room."""
    card = engine.card
    return min(card.num_blocks * card.block_size, card.max_model_len) if card is not None else 0

"""Probes of one engine: whether it is available, which model it serves, and how much work it has.

Each probe asks for the engine's health and its metrics, and sometimes for its models: when it joins, and regularly.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from typing import TypeVar

from tandem.protocol.config import ExternalEnginesConfig
from tandem.protocol.messages import WorkerCard, WorkerLoad, WorkerState
from tandem.router.engines.bounded_json import Outline, loads
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.engine_status import (
    CacheSize,
    ReportedLoad,
    ServedModel,
    parse_cache_size,
    parse_report,
    served_model,
    vllm_gives_token_ids,
)
from tandem.router.engines.probe_client import ProbeFailed
from tandem.router.engines.server_metrics import ServerMetrics
from tandem.router.engines.step_check import StepCheck, StepVerdict
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROBES_PER_LISTING = 5  # an engine's adapters are asked for with every fifth probe
MAX_REASON_CHARS = 500
MAX_QUICK_CHARS = 64 * 1024  # of metrics; longer ones are parsed in a thread, as `tandem serve` does with long prompts
_HEALTH_PATHS = {"openai": "/v1/models", "vllm": "/health", "sglang": "/health", "llamacpp": "/health"}


class EngineProber:
    """Probes one engine until its task is cancelled, and sets the engine's state accordingly."""

    def __init__(
        self,
        engine: RemoteEngine,
        config: ExternalEnginesConfig,
        registry: Registry,
        *,
        worker_timeout_s: float,
        request_timeout_s: float,
        metrics: ServerMetrics,
        check_card: Callable[[WorkerCard], None],
        clock: Callable[[], float],
    ) -> None:
        """`check_card` raises `ValueError` for a card that the engine cannot join with."""
        self._engine = engine
        self._config = config
        self._registry = registry
        self._worker_timeout_s = worker_timeout_s
        self._metrics = metrics
        self._check_card = check_card
        self._clock = clock
        self._has_metrics = True
        self._num_probes = itertools.count(1)
        self._step_check = StepCheck(engine.probe_client, request_timeout_s)
        self._num_failed = 0  # in a row
        self._last_good_s = clock()

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            await self._run()
        finally:
            await self._step_check.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._probe()
                self._num_failed, self._last_good_s = 0, self._clock()
            except (ProbeFailed, LookupError, ValueError) as exc:
                # If nothing listens, one failure is enough; a slow engine gets another chance.
                is_absent = isinstance(exc, ProbeFailed) and exc.is_absent
                self._num_failed += self._config.max_failed_probes if is_absent else 1
                self._on_failure((str(exc) or type(exc).__name__)[:MAX_REASON_CHARS])
            await asyncio.sleep(self._config.probe_interval_s)

    async def _probe(self) -> None:
        engine, timeout_s = self._engine, self._config.probe_timeout_s
        health = await engine.probe_client.get(_HEALTH_PATHS[engine.spec.kind], timeout_s)
        if health.status in (401, 403):
            raise ValueError(f"its health check refused our key ({health.status}); give api_key_env or headers")
        if health.status != 200:
            raise ValueError(f"its health check answered {health.status}")
        rank = engine.spec.data_parallel_rank
        metrics, num_ours = await self._read_metrics()
        report = await _parsed(parse_report, metrics, rank)
        engine.progress.report(report, self._clock())
        if engine.state in (WorkerState.STARTING, WorkerState.DEAD) and not engine.is_removed:
            if not self._may_join():
                return
            await self._join(await _parsed(parse_cache_size, metrics, rank))
        elif next(self._num_probes) % PROBES_PER_LISTING == 0:
            engine.note_served(await self._served_model())
        now = self._clock()
        engine.cache.refresh(report.loaded_tokens, now)
        self._has_metrics = report.load is not None
        self._note_load(report.load or ReportedLoad(0, 0, 0.0), num_ours, now)

    async def _read_metrics(self) -> tuple[str, int]:
        """The text of its `/metrics` ("" if it has none), and the number of our requests on it then.

        An engine without metrics is asked again when it joins.
        """
        engine = self._engine
        if not self._has_metrics and engine.state is WorkerState.READY:
            return "", len(engine.running)
        reading = await self._metrics.read(engine, self._config.probe_timeout_s)
        return reading.text, reading.num_ours.get(engine.name, len(engine.running))

    def _may_join(self) -> bool:
        """Whether it may get requests: after a stall only once it has shown a step, or if it cannot be asked for one.

        Then one request is the breaker's trial, and something is due of it from its beginning.
        """
        engine = self._engine
        if not engine.breaker.has_stalled:
            return True
        if engine.progress.is_on_trial:
            match self._step_check.verdict(engine.spec):
                case StepVerdict.UNKNOWN:
                    return False
                case StepVerdict.CANNOT_BE_ASKED:
                    return not engine.breaker.retry_in_s(self._clock())
                case StepVerdict.COMPUTES:
                    engine.progress.returned(self._clock())
        engine.breaker.succeeded()
        logger.info("engine %s computes again", engine.name)
        return True

    async def _join(self, size: CacheSize) -> None:
        engine = self._engine
        served = await self._served_model()
        card = engine.next_card(served, size)
        self._check_card(card)
        engine.capabilities = served.capabilities
        engine.gives_token_ids = await self._gives_token_ids(served)
        engine.join(card, self._clock())

    async def _served_model(self) -> ServedModel:
        answer = await self._engine.probe_client.get("/v1/models", self._config.probe_timeout_s)
        if answer.status != 200:
            raise ValueError(f"/v1/models answered {answer.status}; is its api_key_env right?")
        catalog = loads(answer.content)
        if isinstance(catalog, Outline):
            raise ValueError("/v1/models lists more than can be read")
        return served_model(catalog, self._engine.spec.model)

    async def _gives_token_ids(self, served: ServedModel) -> bool:
        """Whether its streams can have token ids: vLLM's since a version of it, and those of `tandem serve`."""
        if served.capabilities is not None:
            return served.capabilities.get("token_ids") is True
        if self._engine.spec.kind != "vllm":
            return False
        answer = await self._engine.probe_client.get("/version", self._config.probe_timeout_s)
        return answer.status == 200 and vllm_gives_token_ids(answer.content)

    def _note_load(self, load: ReportedLoad, num_ours: int, now: float) -> None:
        """Tell the registry what the engine reports, and book what others have put on it."""
        engine, card = self._engine, self._engine.card
        if card is None or self._registry.get(engine.name) is None:
            return
        reported = WorkerLoad(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            num_kv_tokens=round(load.kv_usage * card.num_blocks * card.block_size),
            num_free_blocks=round((1 - load.kv_usage) * card.num_blocks),
        )
        self._registry.note_load(engine.name, reported, now)
        engine.foreign.update(load.num_running + load.num_waiting - num_ours, load.num_waiting)

    def _on_failure(self, reason: str) -> None:
        if self._num_failed < self._config.max_failed_probes:
            return
        engine = self._engine
        if engine.state is WorkerState.READY:
            logger.warning("engine %s is not available: %s", engine.name, reason)
            engine.leave(reason)
        engine.reason = reason
        # Requests without a first byte go elsewhere at once; running answers get as long as those of our own workers.
        is_lost = self._clock() - self._last_good_s > self._worker_timeout_s
        for request in list(engine.running):
            if is_lost or not request.has_answer:
                request.abort(engine.name, f"it stopped answering ({reason})")


async def _parsed(parse: Callable[[str, int | None], T], text: str, rank: int | None) -> T:
    """What `parse` finds in an exposition."""
    return parse(text, rank) if len(text) <= MAX_QUICK_CHARS else await asyncio.to_thread(parse, text, rank)

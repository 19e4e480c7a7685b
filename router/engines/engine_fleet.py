"""The engines of one router: adding, draining and removing them. `EngineProber` changes the state of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from zmq.asyncio import Context

from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.messages import Role, WorkerCard, WorkerState
from tandem.router.engines.addresses import public_addresses
from tandem.router.engines.config import EngineSpec, check_fleet
from tandem.router.engines.dispatcher import EngineListener
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.foreign_load import MeanLengths
from tandem.router.engines.prober import EngineProber
from tandem.router.engines.server_metrics import ServerMetrics
from tandem.router.engines.stall_watch import StallWatch
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.time_slicer import TimeSlicer
from tandem.scheduling.admission.tenants import Tenants
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05


class EngineFleet:
    """The engines of one router. Used from one event loop only."""

    def __init__(
        self,
        *,
        registry: Registry,
        index: PrefixIndex,
        costs: CostModel,
        config: RouterConfig,
        engines: ExternalEnginesConfig,
        tenants: Tenants = Tenants(),
        trusted_urls: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Engines at `trusted_urls`, which the operator named, may be on this machine."""
        self.registry = registry
        self.index = index
        self.costs = costs
        self.config = config
        self.engines_config = engines
        self.tenants = tenants
        self.clock = clock
        self._trusted_urls = frozenset(trusted_urls)
        self.lengths = MeanLengths()
        self._engines: dict[str, RemoteEngine] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._listeners: list[EngineListener] = []
        self._background = BackgroundTasks()
        self._watch: asyncio.Task[None] | None = None
        self._context = Context()
        self._slicer = TimeSlicer()
        self._models: dict[str, int | None] | None = None  # with their longest contexts; None = an engine has changed
        self._adapters: dict[str, str] | None = None  # the same
        self._metrics: dict[str, ServerMetrics] = {}  # by server
        registry.listen(self._forget_models)

    @property
    def engines(self) -> list[RemoteEngine]:
        """All engines, in the order in which they were added."""
        return list(self._engines.values())

    @property
    def models(self) -> list[str]:
        """Names of all models, whether or not their engines are ready."""
        return list(self._known_models())

    @property
    def adapters(self) -> dict[str, str]:
        """The base model of each LoRA adapter. A name of several models or adapters belongs to the first one."""
        if self._adapters is None:
            found = {name: engine.spec.model for engine in reversed(self.engines) for name in engine.adapters}
            self._adapters = {name: base for name, base in found.items() if name not in self._known_models()}
        return self._adapters

    @property
    def is_ready(self) -> bool:
        """Whether some engine could take a request."""
        return _can_serve(one for one in self.engines if one.state is WorkerState.READY or one.is_fallback)

    def listen(self, listener: EngineListener) -> None:
        """Tell `listener` about all present engines, and about changes from now on."""
        self._listeners.append(listener)
        for engine in self.engines:
            listener.engine_added(engine.configured, is_trusted=self.trusts(engine.configured))

    def trusts(self, spec: EngineSpec) -> bool:
        """Whether the engine may be at an address of this machine."""
        return self.engines_config.allow_local_engines or spec.url in self._trusted_urls

    def __getitem__(self, name: str) -> RemoteEngine:
        return self._engines[name]

    def get(self, name: str) -> RemoteEngine | None:
        """The engine of this name."""
        return self._engines.get(name)

    def max_model_len(self, model: str) -> int | None:
        """Longest context of the model's engines; None while it is not known."""
        return self._known_models().get(model)

    def capabilities(self, model: str) -> dict[str, Any] | None:
        """The capabilities that all reporting engines of the model share; None if none reports any."""
        told = [engine.capabilities for engine in self.engines if engine.spec.model == model and engine.capabilities]
        if not told:
            return None
        return {name: value for name, value in told[0].items() if all(other.get(name) == value for other in told)}

    def add(self, spec: EngineSpec) -> RemoteEngine:
        """Add an engine and begin to probe it. Raises `ConfigError` when it does not fit the other engines."""
        return self.add_all([spec])[0]

    def add_all(self, specs: Iterable[EngineSpec], *, is_complete: bool = True) -> list[RemoteEngine]:
        """Add several engines, in any order: all of them or, when one does not fit, none.

        Raises `ConfigError`, also if the fleet is complete and nothing in it could decode.
        """
        specs = list(specs)
        check_fleet([*(engine.spec for engine in self.engines), *specs], is_complete=is_complete)
        return [self._start(spec) for spec in specs]

    async def remove(self, name: str) -> None:
        """Drain an engine and forget it. Requests that still run after `drain_timeout_s` are ended.

        If the other engines of its model are gone meanwhile, it serves until one is back, but no longer.
        """
        engine = self._engines[name]
        if engine.is_removed:
            await engine.is_gone.wait()
            return
        engine.is_removed = True
        engine.set_state(WorkerState.DRAINING, "removed", is_fallback=self._is_served_by(self._others(engine)))
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._at_rest(engine)
        except TimeoutError:
            logger.warning("engine %s still runs %d requests after draining", engine.name, len(engine.running))
        engine.set_state(WorkerState.DRAINING, "removed")  # nothing more goes there
        await self._forget(engine)

    async def lose(self, name: str, reason: str) -> None:
        """Forget an engine whose process is gone: its requests end now, or go elsewhere before their first byte."""
        engine = self._engines.get(name)
        if engine is not None:
            engine.is_removed = True
            await self._forget(engine, reason)

    def set_role(self, name: str, role: Role) -> None:
        """Change an engine's role from the next decision on; its running requests stay there."""
        engine = self._engines[name]
        engine.configured, engine.spec = replace(engine.configured, role=role), replace(engine.spec, role=role)
        if self.registry.get(name) is not None:
            self.registry.set_role(name, role)

    async def aclose(self) -> None:
        """End every request and forget every engine. Later calls change nothing."""
        for engine in self.engines:
            await self._forget(engine)
        await self._background.close()
        self._context.term()

    def _others(self, engine: RemoteEngine) -> list[RemoteEngine]:
        """The engines of its model on other servers that stay."""
        spec = engine.spec
        others = (one for one in self.engines if one.spec.model == spec.model and one.spec.server != spec.server)
        return [one for one in others if not one.is_removed]

    def _is_served_by(self, engines: Iterable[RemoteEngine]) -> bool:
        """Whether these engines could answer a request now."""
        now = self.clock()
        return _can_serve(one for one in engines if one.state is WorkerState.READY and one.breaker.allows(now))

    async def _at_rest(self, engine: RemoteEngine) -> None:
        """Wait until a draining engine has ended its requests, and others serve its model, if there are any."""
        while True:
            others = self._others(engine)
            is_missed = engine.is_fallback and others and not self._is_served_by(others)
            if not engine.running and not is_missed:
                return
            await asyncio.sleep(_DRAIN_POLL_S)

    def _start(self, spec: EngineSpec) -> RemoteEngine:
        engine = RemoteEngine(
            spec,
            self.engines_config,
            registry=self.registry,
            index=self.index,
            context=self._context,
            lengths=self.lengths,
            resolve=None if self.trusts(spec) else public_addresses,
            slicer=self._slicer,
        )
        prober = EngineProber(
            engine,
            self.engines_config,
            self.registry,
            worker_timeout_s=self.config.worker_timeout_s,
            request_timeout_s=self.config.request_timeout_s,
            metrics=self._metrics_of(engine),
            check_card=lambda card: self._check_block_size(engine, card),
            clock=self.clock,
        )
        self._watch_for_stalls()
        self._engines[spec.name] = engine
        self._forget_models()
        self._probes[spec.name] = self._background.keep(f"probe of engine {spec.name}", prober.run)
        for listener in self._listeners:
            listener.engine_added(spec, is_trusted=self.trusts(spec))
        return engine

    def _watch_for_stalls(self) -> None:
        """Begin to watch, once there is something to watch."""
        stall_s = stall_limit_s(self.engines_config, self.config)
        if stall_s and self._watch is None:
            watch = StallWatch(lambda: self.engines, stall_s, self.clock)
            self._watch = self._background.keep("watch for stalled engines", watch.run)

    async def _forget(self, engine: RemoteEngine, reason: str = "it was removed") -> None:
        probe = self._probes.get(engine.name)
        if probe is not None:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        if self._probes.pop(engine.name, None) is None:
            return  # somebody else did it meanwhile. A caller that was cancelled before this has changed nothing
        for request in list(engine.running):
            request.abort(engine.name, reason)
        engine.leave(reason)
        del self._engines[engine.name]
        self._metrics[engine.spec.server].engines.remove(engine)
        if not self._metrics[engine.spec.server].engines:
            del self._metrics[engine.spec.server]
        self._forget_models()
        for listener in self._listeners:
            listener.engine_removed(engine.name)
        engine.is_gone.set()
        await engine.close()

    def _metrics_of(self, engine: RemoteEngine) -> ServerMetrics:
        """The metrics of its server, which its other ranks share."""
        is_rank = engine.spec.data_parallel_rank is not None
        max_age_s = 0.9 * self.engines_config.probe_interval_s if is_rank else 0.0
        metrics = self._metrics.setdefault(engine.spec.server, ServerMetrics(max_age_s, self.clock))
        metrics.engines.append(engine)
        return metrics

    def _known_models(self) -> dict[str, int | None]:
        if self._models is None:
            found: dict[str, int | None] = {engine.spec.model: None for engine in self.engines if engine.spec.model}
            for model in found:
                cards = (engine.card for engine in self.engines if engine.spec.model == model)
                found[model] = max((card.max_model_len for card in cards if card is not None), default=None)
            self._models = found
        return self._models

    def _forget_models(self, *_: object) -> None:
        self._models = self._adapters = None

    def _check_block_size(self, engine: RemoteEngine, card: WorkerCard) -> None:
        """Raise `ValueError` if its group has another block size: one chain of digests is computed per group."""
        spec = engine.spec
        for other in self.engines:
            same = other.card is not None and (other.spec.model, other.spec.group) == (card.model, spec.group)
            if same and other is not engine and other.card and other.card.block_size != card.block_size:
                raise ValueError(
                    f"block_size={card.block_size}, but {other.card.block_size} on engine {other.name} of the same "
                    "group; give one of them its own group"
                )


def _can_serve(engines: Iterable[RemoteEngine]) -> bool:
    """Whether these engines could answer a request, alone or as a pair."""
    specs = [engine.spec for engine in engines]
    prefillers = {(spec.model, spec.group) for spec in specs if spec.role is Role.PREFILL}
    return any(
        spec.role is not Role.PREFILL and (spec.serves_alone or (spec.model, spec.group) in prefillers)
        for spec in specs
    )


def stall_limit_s(engines: ExternalEnginesConfig, config: RouterConfig) -> float:
    """The silence after which an engine has stalled; 0 = none.

    A frontend process that hangs reports no tokens. It is ended before engines are blamed for that.
    """
    stall_s = engines.engine_stall_s
    return max(stall_s, 2 * config.worker_timeout_s) if stall_s and config.router_processes > 1 else stall_s

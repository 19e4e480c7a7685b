"""All engines: who is there, how each is, and where a request should go.

The shell around registry, index, cost model and placement: probes engines over HTTP, tells the registry what it finds,
and asks the same `Placer` as our own workers have. Knows nothing of bodies or streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from zmq.asyncio import Context

from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.digest import CacheScope, packed_digests, root_digest
from tandem.protocol.errors import ModelNotFound, NoWorker
from tandem.protocol.messages import Role, WorkerCard, WorkerState
from tandem.router.engines.addresses import public_addresses
from tandem.router.engines.cache_view import digest_root
from tandem.router.engines.config import EngineSpec, check_fleet
from tandem.router.engines.dispatcher import EngineListener
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.errors import EngineBusy
from tandem.router.engines.foreign_load import MeanLengths
from tandem.router.engines.prober import EngineProber
from tandem.runtime.background import BackgroundTasks
from tandem.scheduling.bookings import Booking
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.placement import Placement
from tandem.scheduling.placer import Placer
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.tenants import Tenants
from tandem.scheduling.workers import RegisteredWorker

__all__ = ["EngineDigests", "EngineFleet", "Placed"]

logger = logging.getLogger(__name__)


class EngineDigests:
    """Digests of a prompt's blocks for each model and block size, computed when they are first asked for."""

    def __init__(self, prompt: bytes, scope: CacheScope) -> None:
        """`prompt` are token ids, as `token_bytes` packs them."""
        self._prompt = prompt
        self._scope = scope
        self._digests: dict[tuple[str, int], list[bytes]] = {}

    def of(self, card: WorkerCard) -> Sequence[bytes]:
        """The digests under which an engine with this card caches the prompt."""
        key = (card.model, card.block_size)
        found = self._digests.get(key)
        if found is None:
            root = root_digest(digest_root(*key), cache_salt=self._scope)
            found = self._digests[key] = packed_digests(root, self._prompt, card.block_size)
        return found


class Placed(NamedTuple):
    """Where a request goes, and what it was counted as."""

    placement: Placement
    prefill: RemoteEngine
    decode: RemoteEngine
    digests: Sequence[bytes]

    @property
    def is_pair(self) -> bool:
        """Whether KV is handed over from one engine to another."""
        return self.prefill is not self.decode

    @property
    def engines(self) -> tuple[RemoteEngine, ...]:
        """Each engine it uses, once."""
        return (self.prefill, self.decode) if self.is_pair else (self.decode,)


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = registry
        self.index = index
        self.costs = costs
        self.config = config
        self.engines_config = engines
        self.tenants = tenants
        self.clock = clock
        self.trusted_urls: frozenset[str] = frozenset()  # that the operator named; others may not be on this machine
        self.lengths = MeanLengths()
        self._placer = Placer(registry, index, costs, config)
        self._engines: dict[str, RemoteEngine] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._listeners: list[EngineListener] = []
        self._background = BackgroundTasks()
        self._context = Context()

    @property
    def engines(self) -> list[RemoteEngine]:
        """All of them, in the order they were added."""
        return list(self._engines.values())

    @property
    def models(self) -> list[str]:
        """Names of the models that are served, or would be if their engines were there."""
        return list(dict.fromkeys(engine.spec.model for engine in self.engines if engine.spec.model))

    @property
    def is_ready(self) -> bool:
        """Whether some engine could take a request."""
        return any(
            engine.state is WorkerState.READY and engine.spec.role is not Role.PREFILL for engine in self.engines
        )

    def listen(self, listener: EngineListener) -> None:
        """Tell `listener` of all engines, now and from now on."""
        self._listeners.append(listener)
        for engine in self.engines:
            listener.engine_added(engine.configured, is_trusted=self.trusts(engine.configured))

    def trusts(self, spec: EngineSpec) -> bool:
        """Whether the engine may be at an address of this machine."""
        return self.engines_config.allow_local_engines or spec.url in self.trusted_urls

    def get(self, name: str) -> RemoteEngine | None:
        """The engine of this name."""
        return self._engines.get(name)

    def max_model_len(self, model: str) -> int | None:
        """Longest context any engine of the model has; None while none has told."""
        return max((e.card.max_model_len for e in self.engines if e.card and e.spec.model == model), default=None)

    def add(self, spec: EngineSpec) -> RemoteEngine:
        """Take an engine in and begin to probe it.

        Raises `ConfigError` when it cannot stand beside the others.
        """
        check_fleet([*(engine.spec for engine in self.engines), spec])
        return self._start(spec)

    def add_all(self, specs: Iterable[EngineSpec]) -> None:
        """Take in the engines of a file, whose order does not matter. Raises `ConfigError`."""
        specs = list(specs)
        check_fleet(specs)
        for spec in specs:
            self._start(spec)

    async def remove(self, name: str) -> None:
        """Give an engine nothing new, wait for what it runs, and forget it.

        What it still runs after `drain_timeout_s` is ended.
        """
        await self._drain(self._engines[name])

    async def close(self) -> None:
        """End every request and forget every engine."""
        for engine in self.engines:
            await self._forget(engine)
        self._context.term()

    def place(
        self, model: str, request: PlacementRequest, now: float, tried: Collection[str] = (), **options: Any
    ) -> Placement:
        """The cheapest engine or pair for a request, without those it was `tried` on. `options` are the placer's own.

        Raises `ModelNotFound`, `EngineBusy` when those left ask to wait, and `NoWorker` with the reasons.
        """
        engines = [engine for engine in self.engines if engine.spec.model == model]
        if not engines:
            raise ModelNotFound(f"The model '{model[:200]}' does not exist.", param="model")
        left = [engine for engine in engines if engine.name not in tried and engine.card is not None]
        open_to_it = [engine for engine in left if not engine.refusal(now)]
        try:
            return self._place_among(open_to_it, model, engines, request, now, tried, options)
        except NoWorker:
            last = [engine for engine in left if not engine.refusal(now, is_last=True)]
            if len(last) == len(open_to_it):
                raise
            return self._place_among(last, model, engines, request, now, tried, options)

    def _place_among(
        self,
        open_to_it: list[RemoteEngine],
        model: str,
        engines: list[RemoteEngine],
        request: PlacementRequest,
        now: float,
        tried: Collection[str],
        options: dict[str, Any],
    ) -> Placement:
        decoders = [engine for engine in open_to_it if engine.spec.role is not Role.PREFILL]
        # What is too long for all of them goes there all the same: the engine says so best, in its own 400.
        num_prompt_tokens = max(1, min(request.num_prompt_tokens, max(map(_room, decoders), default=1) - 1))
        request = msgspec.structs.replace(request, num_prompt_tokens=num_prompt_tokens)
        found: list[Placement] = []
        refused: dict[str, NoWorker] = {}  # by group
        for group in dict.fromkeys(engine.spec.group for engine in decoders):
            members = {engine.name for engine in open_to_it if engine.spec.group == group}
            try:
                found.append(self._place_in(members, request, now, options))
            except NoWorker as exc:
                refused[group] = exc
        if not found:
            raise self._nobody(model, engines, tried, now, refused)
        return min(found, key=lambda placement: placement.best.terms.total_s)

    def placed(self, request: PlacementRequest, placement: Placement) -> Placed:
        """The placement with its engines, which must have been placed on just now."""
        best = placement.best
        prefill, decode = self._engines[best.prefill.worker_id], self._engines[best.decode.worker_id]
        return Placed(placement, prefill, decode, request.digests.of(best.prefill.card))

    def book(self, placed: Placed) -> Booking:
        """Let the next decision see this one."""
        now = self.clock()
        for engine in placed.engines:
            engine.cache.expect(placed.digests, now)
        return self.registry.reserve(placed.placement.load)

    def learn_first_token(
        self,
        engine: RemoteEngine,
        worker: RegisteredWorker,
        *,
        sent_s: float,
        now: float,
        num_new_tokens: int,
        num_cached_tokens: int,
    ) -> None:
        """A prompt sent to the engine then has its first token now."""
        stats = engine.step_timing.first_token(
            sent_s=sent_s,
            now=now,
            num_new_tokens=num_new_tokens,
            num_cached_tokens=num_cached_tokens,
            num_decode_seqs=worker.num_booked_seqs - worker.num_awaited_seqs,
            num_kv_tokens=worker.booked_kv_tokens - worker.awaited_kv_tokens,
        )
        if stats is not None:
            self.costs.steps(engine.spec.cost_kind).observe(stats)

    def note_lengths(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Remember how long prompts and answers are."""
        self.lengths.note(num_prompt_tokens, num_output_tokens)

    def _place_in(
        self, members: Collection[str], request: PlacementRequest, now: float, options: dict[str, Any]
    ) -> Placement:
        others = {worker.worker_id for worker in self.registry} - set(members)
        return self._placer.place(request, now, excluded=others, **options)

    def _nobody(
        self, model: str, engines: list[RemoteEngine], tried: Collection[str], now: float, refused: dict[str, NoWorker]
    ) -> NoWorker | EngineBusy:
        reasons = {e.name: "tried" if e.name in tried else e.refusal(now) for e in engines}
        others = dict.fromkeys(e.spec.group for e in engines if not reasons[e.name])
        text = f"no engine of {model} can take this request: " + "; ".join(
            [f"{name} ({reason})" for name, reason in reasons.items() if reason]
            + [str(refused.get(group, "the rest is prefill only")) for group in others]
        )
        waits = [e.busy_until_s - now for e in engines if e.state is WorkerState.READY and e.busy_until_s > now]
        return EngineBusy(text, retry_after_s=min(waits)) if waits else NoWorker(text)

    # -- life of an engine ------------------------------------------------------------------------------------

    def _start(self, spec: EngineSpec) -> RemoteEngine:
        engine = RemoteEngine(
            spec,
            self.engines_config,
            registry=self.registry,
            index=self.index,
            context=self._context,
            lengths=self.lengths,
            resolve=None if self.trusts(spec) else public_addresses,
        )
        prober = EngineProber(
            engine,
            self.engines_config,
            self.registry,
            worker_timeout_s=self.config.worker_timeout_s,
            num_ours=lambda: len(engine.running),
            check_card=lambda card: self._check_block_size(engine, card),
            clock=self.clock,
        )
        self._engines[spec.name] = engine
        self._probes[spec.name] = self._background.keep(f"probe of engine {spec.name}", prober.run)
        for listener in self._listeners:
            listener.engine_added(spec, is_trusted=self.trusts(spec))
        return engine

    async def _drain(self, engine: RemoteEngine) -> None:
        if engine.is_removed:
            await engine.is_gone.wait()
            return
        engine.is_removed = True
        engine.set_state(WorkerState.DRAINING, "removed")
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await engine.idle.wait()
        except TimeoutError:
            logger.warning("engine %s still runs %d requests after draining", engine.name, len(engine.running))
        await self._forget(engine)

    async def _forget(self, engine: RemoteEngine) -> None:
        probe = self._probes.pop(engine.name)
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
        for request in list(engine.running):
            request.abort("it was removed")
        engine.leave("removed")
        del self._engines[engine.name]
        for listener in self._listeners:
            listener.engine_removed(engine.name)
        engine.is_gone.set()
        await engine.close()

    def _check_block_size(self, engine: RemoteEngine, card: WorkerCard) -> None:
        """Raise `ValueError` for a block size unlike its group's: one chain of digests is computed for a group."""
        spec = engine.spec
        for other in self.engines:
            same = other.card is not None and (other.spec.model, other.spec.group) == (card.model, spec.group)
            if same and other is not engine and other.card and other.card.block_size != card.block_size:
                raise ValueError(
                    f"block_size={card.block_size}, but {other.card.block_size} on engine {other.name} of the same "
                    "group; give one of them a group of its own"
                )


def _room(engine: RemoteEngine) -> int:
    """Tokens of the longest context that it has room for."""
    card = engine.card
    return min(card.num_blocks * card.block_size, card.max_model_len) if card is not None else 0

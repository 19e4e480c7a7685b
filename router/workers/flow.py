"""One request from prompt ids to output ids: place, book, dispatch, merge, and give everything back.

Knows the order of things and nothing of sockets, scores or text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import CacheScope, block_digests, root_digest
from tandem.protocol.errors import NoWorker, ServingError, WorkerError
from tandem.protocol.messages import Decode, FinishReason, Generate, KvHolder, Prefill, Role, SequenceDelta, WorkerCard
from tandem.router.admission_queue import NUM_OTHERS, AdmissionQueue, AdmittedRequest
from tandem.router.backend import GenerateRequest, TokenDelta
from tandem.router.callback_scheduler import CallbackScheduler
from tandem.router.streams import DeltaQueue, QueueStream, Stream
from tandem.router.workers.client import Leg, WorkerClient
from tandem.router.workers.pins import Owner, PinService
from tandem.runtime.idle_timeout import IdleTimeout
from tandem.scheduling.admission import Admission, Dispatch
from tandem.scheduling.bookings import Booking
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.decisions import RoutingDecision
from tandem.scheduling.placement import Placement
from tandem.scheduling.placer import Placer
from tandem.scheduling.prefix_index import PrefixIndex
from tandem.scheduling.registry import Registry
from tandem.scheduling.request import CommonDigests, PlacementRequest
from tandem.scheduling.tenants import Tenants
from tandem.scheduling.workers import RegisteredWorker, queue_s

__all__ = ["DeltaOrder", "RequestFlow", "WorkerManager"]

logger = logging.getLogger(__name__)

LONG_PROMPT_TOKENS = 8192  # hashing more than this (0.1 ms, or 0.2 in Python) goes to a thread
HUB_CALLS = 64  # requests whose new tokens go to the edge processes together: they are turned into text there
MAX_ROOTS = 4096  # cached digest roots, one per cache scope and adapter
SHUTTING_DOWN = "the server is shutting down; send the request again"


class WorkerManager(Protocol):
    """What starts the workers and keeps them alive."""

    @property
    def autoscaler_status(self) -> dict[str, object]:
        """What the autoscaler decided last, for `/v1/pools`."""

    async def check_integrity(self) -> dict[str, str]:
        """What is wrong with, or held by, each worker that should be idle; "" where nothing is."""


class RequestFlow:
    """The backend of the HTTP edge: serves requests on the workers of a `WorkerClient`."""

    def __init__(
        self,
        *,
        model: str,
        registry: Registry,
        index: PrefixIndex,
        costs: CostModel,
        placer: Placer,
        sizing: CacheSizing,
        workers: WorkerClient,
        config: RouterConfig,
        manager: WorkerManager | None = None,
        tenants: Tenants = Tenants(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._manager = manager
        self._registry = registry
        self._index = index
        self._costs = costs
        self._placer = placer
        self.admission = Admission(registry, costs, placer, tenants, config)
        self._gate = AdmissionQueue(
            self.admission, registry, self._book, timeout_s=config.request_timeout_s, clock=clock
        )
        self._sizing = sizing
        self._workers = workers
        self._config = config
        self._clock = clock
        self._roots: dict[tuple[bytes, CacheScope, str], bytes] = {}
        self.cache = PinService(registry, index, workers, config, self._digests, clock=clock)
        self._running: set[_Generation] = set()
        is_hub = config.router_processes > 1
        self._scheduler = CallbackScheduler(HUB_CALLS, HUB_CALLS) if is_hub else CallbackScheduler()
        self._is_shut_down = False
        self.num_handoffs = 0  # requests that both workers of a pair sent tokens for

    @property
    def model(self) -> str:
        """Name the model is served under."""
        return self._model

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the workers; None while there is no worker."""
        return min((worker.card.max_model_len for worker in self._registry), default=None)

    @property
    def mean_output_tokens(self) -> float:
        """Moving mean of the answers' lengths."""
        return self.admission.lengths.mean_tokens

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""
        return self._placer.can_place

    def serve(self, request: GenerateRequest) -> Stream[TokenDelta]:
        """Generate, ending with a delta that has a `finish_reason`.

        The stream raises a `ServingError`. Closing it cancels the request on its workers without waiting for them.
        """
        return _Generation(self, request, DeltaQueue(self._scheduler))

    def shut_down(self) -> None:
        """End every running request with an error and refuse new ones: the server is going. Call it in the loop."""
        self._is_shut_down = True
        self._gate.close(lambda: NoWorker(SHUTTING_DOWN))
        for generation in self._running:
            generation.fail(NoWorker(SHUTTING_DOWN))

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise NoWorker(SHUTTING_DOWN)

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """What would be decided for this request now, as JSON; nothing is sent or booked. Raises `NoWorker`."""
        digests = await self._digests(request.token_ids, request.cache_scope, request.adapter)
        now = self._clock()
        forecast = self.admission.forecast(self._placement_request(request, digests), now, num_others=NUM_OTHERS)
        outcome = "rejected" if forecast.error else "admitted"
        decision = RoutingDecision("", request.service_class, now, forecast, outcome, error=forecast.error)
        return decision.to_json(now)

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        return self._gate.log.to_json(self._clock())

    async def pools(self) -> dict[str, Any]:
        """State of the worker pools, as JSON."""
        roles: dict[str, list[dict[str, object]]] = {role.value: [] for role in Role}
        for worker in self._registry:
            roles[worker.role].append(self._worker_state(worker))
        return {
            "roles": roles,
            "costs": self._costs.export(),
            "queued_prompt_tokens": self._registry.queued_prompt_tokens,
            "admission": self.admission.report(),
            "num_requests": self._registry.num_bookings,
            "num_handoffs": self.num_handoffs,
            "num_indexed_blocks": len(self._index),
            "mean_output_tokens": self.mean_output_tokens,
            "cache_sizing": self._sizing.report(),
            "pins": msgspec.to_builtins(self.cache.summary()),
            "autoscaler": {} if self._manager is None else self._manager.autoscaler_status,
        }

    async def check(self) -> dict[str, str]:
        """What is wrong with, or held by, each worker that should be idle; "" where nothing is."""
        return {} if self._manager is None else await self._manager.check_integrity()

    async def _digests(self, token_ids: list[int], scope: CacheScope, adapter: str = "") -> list[bytes]:
        worker = next(iter(self._registry), None)
        if worker is None:
            return []  # placement will say that there is no worker
        root = self._root(worker.card.namespace, scope, adapter)
        block_size = worker.card.block_size
        if len(token_ids) <= LONG_PROMPT_TOKENS:
            return block_digests(root, token_ids, block_size)
        return await asyncio.to_thread(block_digests, root, token_ids, block_size)

    def _note_turn(self, request: GenerateRequest, digests: list[bytes]) -> None:
        """The request's conversation, if it is of one, consists of these blocks now."""
        if request.conversation_id:
            owner = Owner(request.service_class.tenant, request.cache_scope)
            self.cache.note_turn(owner, request.conversation_id, digests)

    def _root(self, namespace: bytes, scope: CacheScope, adapter: str) -> bytes:
        key = (namespace, scope, adapter)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            root = self._roots[key] = root_digest(namespace, cache_salt=scope, lora=adapter)
        return root

    def _placement_request(self, request: GenerateRequest, digests: Sequence[bytes]) -> PlacementRequest:
        return self.admission.request(
            request.service_class,
            num_prompt_tokens=len(request.token_ids),
            digests=CommonDigests(digests),
            max_tokens=request.sampling.max_tokens,
            adapter=request.adapter,
        )

    def _book(self, request: GenerateRequest, dispatch: Dispatch) -> Booking:
        """Let the next decision see this one."""
        best = dispatch.placement.best
        prefill_id, decode_id = best.prefill.worker_id, best.decode.worker_id
        logger.debug(
            "request %s: prefill on %s, decode on %s, %s", request.request_id, prefill_id, decode_id, best.terms
        )
        # An answer of one token comes from the prefill worker, and no KV ever reaches the other.
        holders = {prefill_id} if request.sampling.max_tokens == 1 else {prefill_id, decode_id}
        digests = dispatch.queued.request.digests.of(best.prefill.card)
        self._index.speculate(holders, digests, self._clock())
        return self._registry.reserve(dispatch.placement.load, dispatch.prefill_priority)

    def _dispatch(
        self,
        request: GenerateRequest,
        entered: AdmittedRequest[GenerateRequest, Booking],
        legs: list[Leg],
        queue: DeltaQueue[SequenceDelta],
    ) -> None:
        """Send every leg its part at once. `legs` gets each as it is opened: decode last, or the only one."""
        request_id, token_ids, sampling = request.request_id, request.token_ids, request.sampling
        placement = entered.placement
        prefill, decode = placement.best.prefill.card.address, placement.best.decode.card.address
        kv_holder = _kv_holder(placement)
        if not placement.best.is_pair:
            whole = Generate(
                request_id=request_id,
                token_ids=token_ids,
                sampling=sampling,
                cache_salt=request.cache_scope,
                kv_holder=kv_holder,
                priority=entered.prefill_priority,
            )
            legs.append(self._workers.open_leg(decode.worker_id, whole, queue))
            return
        first = Prefill(
            request_id=request_id,
            token_ids=token_ids,
            sampling=sampling,
            decode_worker=decode,
            cache_salt=request.cache_scope,
            kv_holder=kv_holder,
            priority=entered.prefill_priority,
        )
        rest = Decode(
            request_id=request_id,
            token_ids=token_ids,
            sampling=sampling,
            prefill_worker=prefill,
            cache_salt=request.cache_scope,
        )
        legs.append(self._workers.open_leg(prefill.worker_id, first, queue))
        legs.append(self._workers.open_leg(decode.worker_id, rest, queue))

    def _note_answer(
        self,
        request: GenerateRequest,
        card: WorkerCard,
        digests: list[bytes],
        output: list[int],
        num_cached_tokens: int,
    ) -> None:
        """Let conversation and cache sizing know the answer: the next turn will ask for its blocks too.

        Prompts shorter than a block do not count for the sizing, no cache can hold them. The readiness probe is one.
        """
        parent = digests[-1] if digests else self._root(card.namespace, request.cache_scope, request.adapter)
        # NOTE: the last token's KV is never computed.
        rest = request.token_ids[len(digests) * card.block_size :] + output[:-1]
        answer = block_digests(parent, rest, card.block_size)
        self._note_turn(request, [*digests, *answer])
        if digests:
            self._sizing.observe(
                digests,
                answer,
                block_size=card.block_size,
                num_prompt_tokens=len(request.token_ids),
                num_cached_tokens=num_cached_tokens,
                tenant=request.service_class.tenant,
            )

    def _worker_state(self, worker: RegisteredWorker) -> dict[str, object]:
        card, load = worker.card, worker.load
        return {
            "worker_id": worker.worker_id,
            "epoch": card.address.epoch,
            "state": worker.state.value,
            "kind": card.kind,
            "pid": card.pid,
            "num_blocks": card.num_blocks,
            "num_cached_blocks": self._index.num_blocks(worker.worker_id),
            "num_waiting": load.num_waiting,
            "num_running": load.num_running,
            "num_waiting_tokens": load.num_waiting_tokens,
            "num_kv_tokens": load.num_kv_tokens,
            "num_free_blocks": load.num_free_blocks,
            "max_num_seqs": card.max_num_seqs,
            "num_free_seats": load.num_free_seats,
            "num_open_leases": load.num_open_leases,
            "num_quarantined_blocks": load.num_quarantined_blocks,
            "num_waiting_for_room": load.num_waiting_for_room,
            "num_preemptions": load.num_preemptions,
            "num_errors": load.num_errors,
            "num_recomputed": load.num_recomputed,
            "step_age_s": worker.step_age_s,
            "silent_s": max(self._clock() - worker.last_seen_s, 0.0),
            "queued_prompt_tokens": worker.uncomputed_tokens,
            "num_booked_seqs": worker.num_booked_seqs,
            "booked_kv_tokens": worker.booked_kv_tokens,
            "queue_s": queue_s(worker, self._costs.steps(card.kind)),
            "tiers": [msgspec.to_builtins(tier) for tier in worker.tiers],
            "fetches": msgspec.to_builtins(worker.fetches),
            "links": [msgspec.to_builtins(link) for link in worker.links],
            "quarantines": [msgspec.to_builtins(quarantine) for quarantine in worker.quarantines],
            "pins": msgspec.to_builtins(worker.pins),
        }


class _Generation(QueueStream[SequenceDelta, TokenDelta]):
    """One request on its workers: its turn, its legs, its tokens in order, and all given back."""

    def __init__(self, flow: RequestFlow, request: GenerateRequest, queue: DeltaQueue[SequenceDelta]) -> None:
        super().__init__(queue)
        self._flow = flow
        self._request = request
        self._entered: AdmittedRequest[GenerateRequest, Booking] | None = None
        self._legs: list[Leg] = []  # decode last, or the only one
        self._awaits_handoff = False
        self._order = DeltaOrder()
        self._output: list[int] = []
        self._num_cached_tokens = 0

    def fail(self, error: ServingError) -> None:
        """End it with this error, after the tokens that have arrived."""
        self._queue.fail(error)

    def close(self) -> None:
        """Take its load off again and cancel what still runs."""
        entered, self._entered = self._entered, None
        if entered is None:
            return
        if self._idle is not None:
            self._idle.close()
        self._flow._running.discard(self)
        entered.end()
        for leg in self._legs:
            leg.cancel()
        if self._output:
            card = entered.placement.best.decode.card
            self._flow._note_answer(self._request, card, self._digests, self._output, self._num_cached_tokens)

    async def _begin(self) -> None:
        flow, request = self._flow, self._request
        self._digests = await flow._digests(request.token_ids, request.cache_scope, request.adapter)
        flow._check_open()
        entered = self._entered = await flow._gate.enter(request, flow._placement_request(request, self._digests))
        self._idle = IdleTimeout(flow._config.request_timeout_s, self._fail_idle)
        flow._check_open()
        flow._note_turn(request, self._digests)
        flow._dispatch(request, entered, self._legs, self._queue)
        self._awaits_handoff = len(self._legs) > 1
        flow._running.add(self)

    def _convert(self, deltas: list[SequenceDelta]) -> list[TokenDelta]:
        if self._awaits_handoff and all(leg.has_delivered for leg in self._legs):
            self._awaits_handoff = False
            self._legs[0].close()  # the prefill worker has done its part: its death does not matter any more
            self._flow.num_handoffs += 1
        due: list[SequenceDelta] = []
        for delta in deltas:
            due += self._order.push(delta)
        return [self._noted(_token_delta(due))] if due else []

    def _noted(self, delta: TokenDelta) -> TokenDelta:
        if not self._output and self._entered is not None:
            self._entered.first_token()
            if self._request.explains:
                delta = msgspec.structs.replace(delta, decision=self._entered.explain())
        self._output += delta.token_ids
        self._num_cached_tokens += delta.num_cached_tokens or 0
        if delta.finish_reason is not None:
            self._has_ended = True
            self._flow.admission.lengths.note(self._request.service_class.tenant, self._order.num_tokens)
        return delta

    def _fail_idle(self) -> None:
        name, timeout_s = self._request.request_id, self._flow._config.request_timeout_s
        self.fail(WorkerError(f"request {name} got no token within request_timeout_s={timeout_s}"))


class DeltaOrder:
    """Puts the deltas of one request in order of their offsets; both legs may be ahead of each other."""

    def __init__(self) -> None:
        self.num_tokens = 0  # passed on so far
        self._early: dict[int, SequenceDelta] = {}

    def push(self, delta: SequenceDelta) -> list[SequenceDelta]:
        """The deltas that are due now. Raises `WorkerError` when tokens come twice."""
        if delta.offset < self.num_tokens or delta.offset in self._early:
            raise WorkerError(
                f"request {delta.request_id} got output token {delta.offset} twice; {self.num_tokens} were passed on"
            )
        self._early[delta.offset] = delta
        due: list[SequenceDelta] = []
        while (next_delta := self._early.pop(self.num_tokens, None)) is not None:
            due.append(next_delta)
            self.num_tokens += len(next_delta.token_ids)
        return due


def _kv_holder(placement: Placement) -> KvHolder | None:
    holder = placement.best.holder
    return None if holder is None else KvHolder(holder.worker.card.address, holder.num_blocks)


def _token_delta(due: list[SequenceDelta]) -> TokenDelta:
    """Deltas that came at once, as one."""
    first, last = due[0], due[-1]
    if last.finish_reason is FinishReason.ABORT:
        raise WorkerError(f"request {last.request_id} was aborted by its worker")
    is_one = len(due) == 1
    return TokenDelta(
        token_ids=first.token_ids if is_one else [token for delta in due for token in delta.token_ids],
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        num_cached_tokens=first.num_cached_tokens,
        logprobs=first.logprobs if is_one or first.logprobs is None else [p for d in due for p in d.logprobs or ()],
    )

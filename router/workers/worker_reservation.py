"""The deciding half of a request on our own workers. `Generation`, the other half, sends it and passes tokens on."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec
from typing_extensions import override

from tandem.protocol.config import RouterConfig
from tandem.protocol.digest import token_bytes
from tandem.protocol.errors import WorkerTimeout
from tandem.protocol.messages import WorkerPriority
from tandem.router.admission_queue import AdmissionQueue, AdmittedRequest
from tandem.router.backend import GenerateRequest
from tandem.router.reservation import Reservation, ReservationContext, fingerprint_of
from tandem.router.workers.pin_ledger import PinOwner
from tandem.router.workers.pins import PinService
from tandem.router.workers.prompt_hasher import PromptHasher
from tandem.scheduling.admission.admission import Admission
from tandem.scheduling.cache_sizing import CacheSizing
from tandem.scheduling.placement.placement import Placement
from tandem.scheduling.placement.prefix_index import PrefixIndex
from tandem.scheduling.request import CommonDigests, PlacementRequest
from tandem.scheduling.workers.bookings import Booking
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class WorkerReservationContext(ReservationContext):
    """What all reservations of our own workers share."""

    config: RouterConfig
    registry: Registry
    index: PrefixIndex
    sizing: CacheSizing
    admission: Admission
    admission_queue: AdmissionQueue[Booking]
    hasher: PromptHasher
    pins: PinService


class WorkerReservation(Reservation[Booking]):
    """What a request holds in the router. `output` are the tokens of its answer so far."""

    context: WorkerReservationContext

    def __init__(self, context: WorkerReservationContext, request: GenerateRequest) -> None:
        super().__init__(context, request.request_id, explains=request.explains)
        self._request = request
        self._digests: list[bytes] = []  # of the full blocks of the prompt

    @override
    def fingerprint(self) -> bytes:
        """Without the seed, which is drawn each time."""
        sampling = msgspec.structs.replace(self._request.sampling, seed=0)
        return fingerprint_of(token_bytes(self._request.token_ids), sampling, self._request.adapter)

    async def hash_prompt(self) -> None:
        """Compute the digests of the prompt's blocks."""
        request = self._request
        self._digests = await self.context.hasher.digests(request.token_ids, request.cache_scope, request.adapter)

    async def place(self) -> None:
        """Wait until it may run; a choice of an answer that may have begun waits for a worker too."""
        options = {"is_resumed": self._request.is_later_choice, "is_admitted": bool(self._request.fork_of)}
        placement_request = self._placement_request([], may_cover=True, may_fall_back=True, **options)
        try:
            self.admitted = await self.context.admission_queue.enter(self, placement_request)
        except TimeoutError:
            raise self.idle_error() from None

    def fork(self, leader: WorkerReservation) -> None:
        """Go where the leader was placed just now, which computes the same prompt."""
        self._digests = leader._digests
        placement_request = self._placement_request([])
        self.admitted = self.context.admission_queue.fork(self, placement_request, leader.admitted)

    @property
    def num_forks(self) -> int:
        """Further answers to its prompt for which its decode worker has seats and memory; 0 if a worker is gone."""
        placement, registry = self.admitted.placement, self.context.registry
        worker, card = placement.best.decode, placement.best.decode.card
        if any(registry.get(one.worker_id) is not one for one in (placement.best.prefill, worker)):
            return 0
        num_seats = card.max_num_seqs - worker.num_booked_seqs if card.max_num_seqs else card.num_blocks
        num_tokens = card.num_blocks * card.block_size - worker.booked_kv_tokens
        return max(min(num_seats, num_tokens // max(placement.expected_output_tokens, 1)), 0)

    async def place_again(self, output: list[int], *, can_hand_over: bool) -> None:
        """Wait for a worker that can go on, `request_timeout_s` at most."""
        rest = self._placement_request(output, is_resumed=True, may_fall_back=True, can_hand_over=can_hand_over)
        try:
            self.admitted = await self.context.admission_queue.enter_again(self, rest, self.admitted.decision)
        except TimeoutError:
            raise self.idle_error() from None

    def place_elsewhere(self, output: list[int], excluded: Collection[str]) -> AdmittedRequest[Booking] | None:
        """Book another decode worker beside the present one, but none of those `excluded`; None if there is none."""
        rest = self._placement_request(output, can_hand_over=False)  # no third worker has more of the KV
        return self.context.admission_queue.place_elsewhere(self, rest, self.admitted.decision, excluded=excluded)

    def next_worker(self, output: list[int], excluded: Collection[str]) -> str:
        """Id of the worker that `place_elsewhere` would choose; nothing is booked. Raises `NoWorker`."""
        rest = self._placement_request(output, can_hand_over=False)
        return self.context.admission.place_again(rest, self.context.now(), excluded=excluded).best.decode.worker_id

    async def explain(self) -> dict[str, Any]:
        """The decision that it would get now, as JSON; nothing is booked. Raises `NoWorker`."""
        await self.hash_prompt()
        return self.context.admission_queue.explain(self._placement_request([], may_cover=True, may_fall_back=True))

    def book(self, placed: PlacementRequest, placement: Placement, priority: WorkerPriority) -> Booking:
        """Book a placement, so that the next decision sees it."""
        best, context = placement.best, self.context
        prefill_id, decode_id = best.prefill.worker_id, best.decode.worker_id
        logger.debug("request %s: prefill on %s, decode on %s, %s", self.request_id, prefill_id, decode_id, best.terms)
        # An answer of one token comes from the prefill worker, and no KV ever reaches the other.
        holders = {prefill_id} if self._request.sampling.max_tokens == 1 else {prefill_id, decode_id}
        context.index.speculate(holders, placed.digests.of(best.prefill.card), context.now())
        return context.registry.reserve(placement.load, priority)

    def digests(self, output: list[int]) -> list[bytes]:
        """Digests of the full blocks of the prompt and of the answer so far."""
        return [*self._digests, *self._answer_digests(output)] if output else self._digests

    def note_grammar(self, grammar_s: float) -> None:
        """A worker took this time for its grammar."""
        self.context.admission.note_grammar(self._request.service_class.tenant, grammar_s)

    def note_complete(self, num_output_tokens: int) -> None:
        """Its answer has ended by itself."""
        self.context.admission.note_answer(self._request.service_class.tenant, num_output_tokens)

    def record_turn(self, digests: list[bytes]) -> None:
        """Tell the pins that the conversation consists of these blocks now."""
        request = self._request
        if request.conversation_id:
            owner = PinOwner(request.service_class.tenant, request.cache_scope)
            self.context.pins.record_turn(owner, request.conversation_id, digests)

    def record_answer(self, output: list[int], num_cached_tokens: int) -> list[bytes]:
        """Tell pins and cache sizing about the answer: the conversation's next turn will ask for its blocks too.

        Returns the digests from the prompt's last full block on.

        Prompts shorter than a block do not count for the sizing, as no cache can hold them: the readiness probe is one.
        Scored prompts do not either, because they use no cache.
        """
        request, digests, answer = self._request, self._digests, self._answer_digests(output)
        self.record_turn([*digests, *answer])
        if digests and request.sampling.num_prompt_logprobs is None:
            self.context.sizing.observe(
                digests,
                answer,
                block_size=self.admitted.placement.best.decode.card.block_size,
                num_prompt_tokens=len(request.token_ids),
                num_cached_tokens=num_cached_tokens,
                tenant=request.service_class.tenant,
            )
        return [*digests[-1:], *answer]

    def idle_error(self) -> WorkerTimeout:
        """The error for a request that got nothing for too long."""
        return WorkerTimeout(
            f"request {self.request_id} got no token within request_timeout_s={self.context.config.request_timeout_s}; "
            "send fewer or shorter prompts at once, add workers, or raise it"
        )

    def _placement_request(self, output: list[int], **options: bool) -> PlacementRequest:
        """The rest of the request, as admission and placement know it. A scored prompt finds nothing cached."""
        request = self._request
        is_scored = request.sampling.num_prompt_logprobs is not None and not output
        placement_request = self.context.admission.placement_request(
            request.service_class,
            num_prompt_tokens=len(request.token_ids) + len(output),
            digests=CommonDigests([] if is_scored else self.digests(output)),
            max_tokens=request.sampling.max_tokens - len(output),
            adapter=request.adapter,
        )
        return msgspec.structs.replace(placement_request, **options)

    def _answer_digests(self, output: list[int]) -> list[bytes]:
        """Digests of the full blocks that the answer so far adds to the prompt's."""
        hasher, card = self.context.hasher, self.admitted.placement.best.decode.card
        return hasher.answer_digests(self._request, self._digests, output, card.namespace, card.block_size)

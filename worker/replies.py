"""Everything a worker says to routers: tokens, failures, block events, its card."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from tandem.engine.sequence import Sequence
from tandem.engine.step_result import SequenceOutput
from tandem.protocol.digest import join_digests
from tandem.protocol.errors import WorkerError
from tandem.protocol.messages import (
    MAX_RUN_DIGESTS,
    WIRE_VERSION,
    BlockEvents,
    BlockSnapshot,
    FinishReason,
    Hello,
    Message,
    PeerAddress,
    RequestFailed,
    SequenceDelta,
    StepOutput,
    StepStats,
    Welcome,
    WorkerCard,
    WorkerLoad,
)
from tandem.worker.sockets import WorkerSockets


class RouterReplies:
    """The routers that are connected, and which of them sent each request."""

    def __init__(self, address: PeerAddress, sockets: WorkerSockets) -> None:
        self._address = address
        self._sockets = sockets
        self._routers: dict[bytes, str] = {}  # socket identity -> router id
        self._requests: dict[str, bytes] = {}  # request id -> socket identity of its router
        self._event_sequences: Counter[str] = Counter()  # by place

    @property
    def request_ids(self) -> frozenset[str]:
        """Requests that this worker still has something to say about."""
        return frozenset(self._requests)

    def send(self, identity: bytes, message: Message) -> None:
        """Answer the router that is connected under this identity."""
        self._sockets.reply(identity, message)

    def welcome(self, identity: bytes, hello: Hello, card: WorkerCard) -> list[str]:
        """Tell a router who this is. From then on it gets every step's statistics and all block events.

        Returns requests that nobody waits for: the router sent them by a connection that it has given up.
        """
        if hello.wire_version != WIRE_VERSION:
            refusal = f"wire version {hello.wire_version} there, {WIRE_VERSION} here"
            self.send(identity, Welcome(card=card, refusal=refusal))
            return []
        former = {one for one, router_id in self._routers.items() if router_id == hello.router_id and one != identity}
        self._routers = {one: router_id for one, router_id in self._routers.items() if one not in former}
        self._routers[identity] = hello.router_id
        self.send(identity, Welcome(card=card))
        return [request_id for request_id, one in self._requests.items() if one in former]

    def forget_routers(self) -> list[str]:
        """Forget all routers: those that were welcomed are gone. Returns the requests that they sent."""
        self._routers.clear()
        return list(self._requests)

    def open(self, request_id: str, identity: bytes) -> bool:
        """Remember which router sent a request. Returns False if the request is already known."""
        if request_id in self._requests:
            return False
        self._requests[request_id] = identity
        return True

    def refuse(self, identity: bytes, request_id: str, reason: str) -> None:
        """Fail a request that was never opened."""
        self.send(identity, RequestFailed(request_id=request_id, message=reason, code=WorkerError.code or ""))

    def fail(self, request_id: str, message: str, code: str, sequence: Sequence | None = None) -> None:
        """Tell the router that a request failed, and what its sequence took; nothing more is said about it."""
        identity = self._requests.pop(request_id, None)
        if identity is not None:
            failed = RequestFailed(
                request_id=request_id,
                message=message,
                code=code,
                num_computed_tokens=0 if sequence is None else sequence.num_computed_prompt_tokens,
                grammar_s=0.0 if sequence is None else _grammar_s(sequence),
            )
            self.send(identity, failed)

    def forget(self, request_id: str) -> None:
        """Say nothing more about a request."""
        self._requests.pop(request_id, None)

    def send_first_tokens(self, outputs: Iterable[SequenceOutput], load: WorkerLoad) -> None:
        """Send tokens that were sampled in an earlier step, to the routers they are for."""
        self._send_output(outputs, StepStats(duration_s=0.0), load, {})

    def send_step(self, outputs: Iterable[SequenceOutput], stats: StepStats, load: WorkerLoad) -> None:
        """Send a step's tokens to the routers they are for, in one message each, and its statistics to all."""
        self._send_output(outputs, stats, load, {identity: [] for identity in self._routers})

    def send_end(self, request_id: str, load: WorkerLoad) -> None:
        """Tell the router that a request which gets no tokens is done."""
        identity = self._requests.pop(request_id, None)
        if identity is not None:
            delta = SequenceDelta(request_id=request_id, offset=0, token_ids=[], finish_reason=FinishReason.LENGTH)
            self._send_deltas(identity, [delta], StepStats(duration_s=0.0), load)

    def send_events(self, changes: Mapping[str, tuple[list[bytes], list[bytes]]]) -> None:
        """Tell all routers which blocks were (stored, removed), by place."""
        for place, (stored, removed) in changes.items():
            for first in range(0, max(len(stored), len(removed)), MAX_RUN_DIGESTS):
                self._event_sequences[place] += 1
                events = BlockEvents(
                    worker_id=self._address.worker_id,
                    epoch=self._address.epoch,
                    sequence=self._event_sequences[place],
                    stored=join_digests(stored[first : first + MAX_RUN_DIGESTS]),
                    removed=join_digests(removed[first : first + MAX_RUN_DIGESTS]),
                    place=place,
                )
                for identity in self._routers:
                    self.send(identity, events)

    def send_snapshot(self, identity: bytes, place: str, digests: list[bytes]) -> None:
        """Tell one router about all blocks in a place. The events that led to them must have been sent before."""
        num_parts = max(-(-len(digests) // MAX_RUN_DIGESTS), 1)
        for part in range(num_parts):
            first = part * MAX_RUN_DIGESTS
            snapshot = BlockSnapshot(
                worker_id=self._address.worker_id,
                epoch=self._address.epoch,
                sequence=self._event_sequences[place],
                digests=join_digests(digests[first : first + MAX_RUN_DIGESTS]),
                place=place,
                part=part,
                is_last=part == num_parts - 1,
            )
            self.send(identity, snapshot)

    def _send_output(
        self,
        outputs: Iterable[SequenceOutput],
        stats: StepStats,
        load: WorkerLoad,
        deltas: dict[bytes, list[SequenceDelta]],
    ) -> None:
        for output in outputs:
            sequence = output.sequence
            identity = self._requests.get(sequence.request_id)
            if identity is None:
                continue
            deltas.setdefault(identity, []).append(_delta(output))
            if output.finish_reason is not None:
                del self._requests[sequence.request_id]
        for identity, items in deltas.items():
            self._send_deltas(identity, items, stats, load)

    def _send_deltas(self, identity: bytes, deltas: list[SequenceDelta], stats: StepStats, load: WorkerLoad) -> None:
        worker_id, epoch = self._address.worker_id, self._address.epoch
        self.send(identity, StepOutput(worker_id=worker_id, epoch=epoch, deltas=deltas, stats=stats, load=load))


def _delta(output: SequenceOutput) -> SequenceDelta:
    sequence = output.sequence
    scores = sequence.prompt_scores if output.offset == 0 else None
    timeline, sequence.timeline = sequence.timeline, None
    return SequenceDelta(
        request_id=sequence.request_id,
        offset=output.offset,
        token_ids=[output.token_id],
        finish_reason=output.finish_reason,
        stop_token_id=output.stop_token_id,
        num_cached_tokens=sequence.num_cached_tokens if output.offset == 0 else None,
        num_loaded_tokens=(sequence.num_loaded_tokens or None) if output.offset == 0 else None,
        logprobs=None if output.logprobs is None else [output.logprobs],
        prompt_logprobs=None if scores is None else scores.packed(),
        grammar_s=0.0 if output.finish_reason is None else _grammar_s(sequence),
        num_accepted_tokens=output.num_accepted_tokens,
        num_rejected_tokens=output.num_rejected_tokens,
        timeline=None if timeline is None else timeline.ages(time.monotonic()),
    )


def _grammar_s(sequence: Sequence) -> float:
    return 0.0 if sequence.matcher is None else sequence.matcher.total_cost_s + sequence.matcher.draft_s

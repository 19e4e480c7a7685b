"""Follows one sequence through admission and its workers, and makes spans of that. Pure: the clock is passed in.

generate
  admission            in the router's queue
    placement          one decision, with its terms
  prefill              from dispatch to the first token, as the router sees it
    prefill.queue      on the worker, until its first step
    prefill.compute
  lease_wait           until the decode worker has room
  kv_transfer          from the first blocks that could be written to the last that arrived
  decode               from the first token to the last
    decode.queue       from the last block to the first step
  move                 from the loss of its workers to the next token, which others give; one for each loss
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tandem.protocol.errors import Overloaded
from tandem.protocol.timeline import Ages
from tandem.runtime.tracing.itl import ItlSummary
from tandem.runtime.tracing.span_node import Attributes, SpanNode
from tandem.scheduling.decisions import RoutingDecision
from tandem.scheduling.placement.placement import Placement

if TYPE_CHECKING:
    from tandem.router.backend import GenerateRequest


class _Told(NamedTuple):
    """A worker's report about a sequence: when things happened, on the router's clock, and how many."""

    marks: dict[str, float]
    counts: dict[str, int]

    @property
    def attributes(self) -> Attributes:
        return {f"tandem.{name}": number for name, number in self.counts.items()}


@dataclass(slots=True)
class _Move:
    """The loss of a sequence's workers."""

    lost_s: float
    error: BaseException
    num_tokens: int  # tokens before it
    decision: RoutingDecision
    next_token_s: float | None = None


class GenerationTrace:
    """The moments of one sequence, on the router's clock."""

    def __init__(self, request: GenerateRequest, now: float) -> None:
        self._request = request
        self._start_s = now
        self._entered_s = now
        self._dispatched_s: float | None = None
        self._decision: RoutingDecision | None = None
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._num_tokens = self._num_cached_tokens = 0
        self._finish_reason = ""
        self._itl = ItlSummary()
        self._error: BaseException | None = None
        self._first = self._later = _Told({}, {})  # from the prompt's worker, and from the one it was handed to
        self._moves: list[_Move] = []

    def entered(self, now: float) -> None:
        """The request asks to be admitted."""
        self._entered_s = now

    def dispatched(self, decision: RoutingDecision, now: float) -> None:
        """The request was admitted and goes to its workers."""
        self._decision, self._dispatched_s = decision, now

    def worker_told(self, ages: Ages, now: float, *, offset: int) -> None:
        """A worker's first tokens came, with what it did for them. `offset` is the number of tokens before them."""
        if self._moves:  # the spans above are those of the first workers
            return
        told = _Told({name: now - age_s for name, age_s in ages.ages_s.items()}, ages.counts)
        if offset:
            self._later = told
        else:
            self._first = told

    def moved(self, lost_s: float, error: BaseException, decision: RoutingDecision) -> None:
        """Its workers were lost, and others go on with it."""
        self._moves.append(_Move(lost_s, error, self._num_tokens, decision))

    def tokens(self, count: int, num_cached_tokens: int | None, finish_reason: str | None, now: float) -> None:
        """Tokens came."""
        for move in self._moves:
            move.next_token_s = now if move.next_token_s is None else move.next_token_s
        if self._first_token_s is None:
            self._first_token_s = now
        else:
            self._itl.add(now - self._last_token_s)
        self._last_token_s = now
        self._num_tokens += count
        self._num_cached_tokens += num_cached_tokens or 0
        self._finish_reason = finish_reason or ""

    def failed(self, error: BaseException) -> None:
        """It ended with this error."""
        self._error = error

    def finish(self, now: float) -> SpanNode:
        """The whole trace, ended now."""
        node = SpanNode("generate", self._start_s, now, self._attributes())
        # Nothing asked for more tokens: a stop string was found, or the client has left.
        node.attributes["tandem.finish_reason"] = self._finish_reason or ("error" if self._error else "closed")
        self._add_admission(node)
        if self._dispatched_s is not None:
            self._add_sub_requests(node, self._dispatched_s)
        self._add_moves(node)
        if self._first_token_s is not None:
            node.events.append(("first_token", self._first_token_s))
        if self._error is not None:
            node.fail(self._error)
        return node

    def _attributes(self) -> Attributes:
        request = self._request
        attributes: Attributes = {
            "tandem.request_id": request.request_id,
            "tandem.tenant": request.service_class.tenant,
            "tandem.priority": request.service_class.priority,
            "gen_ai.usage.input_tokens": len(request.token_ids),
            "gen_ai.usage.output_tokens": self._num_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
            "gen_ai.request.max_tokens": request.sampling.max_tokens,
        }
        if self._first_token_s is not None:
            attributes["tandem.ttft_s"] = self._first_token_s - self._start_s
        return attributes

    def _add_admission(self, node: SpanNode) -> None:
        is_refused = self._dispatched_s is None
        end_s = node.end_s if self._dispatched_s is None else self._dispatched_s
        error = self._error if is_refused else None
        node.children.append(admission_node(self._entered_s, end_s, self._decision, error))

    def _add_sub_requests(self, node: SpanNode, dispatched_s: float) -> None:
        marks = self._first.marks
        end_s = node.end_s if self._first_token_s is None else self._first_token_s
        worker = self._decision.placement.best.prefill.worker_id if self._decision and self._decision.placement else ""
        prefill = node.child("prefill", dispatched_s, end_s, {"tandem.worker": worker})
        assert prefill is not None, "both times are known"
        prefill.child("prefill.queue", marks.get("received"), marks.get("computing"))
        # The worker may hold the first token until the prompt has a lease: that is not computing.
        prefill.child("prefill.compute", marks.get("computing"), marks.get("sampled"), self._first.attributes)
        if self._first_token_s is None and self._error is not None:
            prefill.fail(self._error)
        granted_s = marks.get("lease_granted")
        node.child("lease_wait", marks.get("lease_requested"), granted_s)
        if granted_s is not None:  # blocks can be written once there is a lease and a step has ended
            start_s = max(granted_s, marks.get("first_chunk", granted_s))
            node.child("kv_transfer", start_s, self._later.marks.get("all_blocks"), self._later.attributes)
        self._add_decode(node)

    def _add_moves(self, node: SpanNode) -> None:
        for move in self._moves:
            end_s = node.end_s if move.next_token_s is None else move.next_token_s
            attributes: Attributes = {"tandem.output_tokens": move.num_tokens, "tandem.move.reason": str(move.error)}
            node.child("move", move.lost_s, end_s, attributes | _placement_attributes(move.decision.placement))

    def _add_decode(self, node: SpanNode) -> None:
        if self._first_token_s is None or self._num_tokens < 2:
            return
        best = self._decision.placement.best if self._decision and self._decision.placement else None
        attributes: Attributes = {"tandem.output_tokens": self._num_tokens - 1} | self._itl.attributes()
        if best is not None:
            attributes["tandem.worker"] = best.decode.worker_id
        decode = node.child("decode", self._first_token_s, self._last_token_s, attributes)
        assert decode is not None, "both times are known"
        decode.child("decode.queue", self._later.marks.get("all_blocks"), self._later.marks.get("computing"))
        if self._error is not None:
            decode.fail(self._error)


def admission_node(
    start_s: float, end_s: float, decision: RoutingDecision | None, error: BaseException | None
) -> SpanNode:
    """The span of the router's queue, with the decision that ended it."""
    node = SpanNode("admission", start_s, end_s, {"tandem.outcome": "dispatched" if decision else "refused"})
    if error is not None:
        node.fail(error)
        if isinstance(error, Overloaded):
            node.attributes["tandem.retry_after_s"] = error.retry_after_s
    if decision is None:
        return node
    node.attributes["tandem.queue.wait_s"] = decision.wait_s or 0.0
    if (forecast := decision.forecast) is not None:
        node.attributes["tandem.queue.place"] = forecast.ahead.num_requests
        node.attributes["tandem.predicted_ttft_s"] = forecast.ttft_s
    node.child("placement", decision.decided_s, decision.booked_s, _placement_attributes(decision.placement))
    return node


def placement_node(start_s: float, end_s: float, placement: Placement | None, error: BaseException | None) -> SpanNode:
    """The span of a decision outside of the queue, for a request that failed at its first place."""
    node = SpanNode("placement", start_s, end_s, _placement_attributes(placement))
    if error is not None:
        node.fail(error)
    return node


def _placement_attributes(placement: Placement | None) -> Attributes:
    """The workers that were chosen, the terms of the cost, and the cost of the runner-up."""
    if placement is None:
        return {}
    best, runner_up = placement.best, placement.runner_up
    attributes: Attributes = {
        "tandem.placement.prefill_worker": best.prefill.worker_id,
        "tandem.placement.decode_worker": best.decode.worker_id,
        "tandem.placement.cached_tokens": best.num_cached_tokens,
        "tandem.placement.new_tokens": placement.num_new_tokens,
        "tandem.placement.total_s": best.terms.total_s,
    }
    attributes |= {f"tandem.placement.{name}": value for name, value in best.terms._asdict().items()}
    if best.holder is not None:
        attributes["tandem.placement.kv_holder"] = best.holder.worker.worker_id
    if best.tier:
        attributes["tandem.placement.kv_tier"] = best.tier
    if runner_up is not None:
        attributes["tandem.placement.runner_up"] = f"{runner_up.prefill.worker_id}+{runner_up.decode.worker_id}"
        attributes["tandem.placement.runner_up_total_s"] = runner_up.terms.total_s
    return attributes

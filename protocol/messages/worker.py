"""What a worker is and how it is doing: its card, its load, and the heartbeat it publishes."""

from __future__ import annotations

import enum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tandem.protocol.messages.fields import Digest, Measure, Name, Names, Number, Seconds
from tandem.protocol.messages.places import HOST_TIER

MAX_ACTIONS = 16  # latest actions of a kind that a heartbeat tells


class Role(enum.StrEnum):
    """What a worker is used for now. Any engine can serve in any role; the role is a policy."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # both at once


class WorkerState(enum.StrEnum):
    """Life cycle of a worker, as its registry sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes its requests; gets new ones only as a fallback
    DEAD = "dead"


class WorkerEpoch(NamedTuple):
    """One process of a worker: the epoch changes with each start."""

    worker_id: Name
    epoch: Number


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a worker is reached. The epoch changes with each start of its process."""

    worker_id: Name
    epoch: Number
    endpoint: Name  # ZMQ ROUTER socket for requests and peer messages
    heartbeat_endpoint: Name  # ZMQ PUB socket
    public_key: Name = ""  # CURVE key of the process at these endpoints: see runtime/curve.py

    @property
    def process(self) -> WorkerEpoch:
        """The process that is reached here."""
        return WorkerEpoch(self.worker_id, self.epoch)


class KvHolder(msgspec.Struct, frozen=True):
    """A worker believed to have the KV of a prompt's leading blocks, in its pool or its host memory."""

    worker: PeerAddress
    num_blocks: Number


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a router must know about a worker to place requests on it."""

    address: PeerAddress
    role: Role
    kind: Name  # workers of one kind share a cost model, e.g. "cpu-1" or "NVIDIA H200"
    model: Name
    max_model_len: Number
    block_size: Number
    num_blocks: Number
    block_bytes: Number
    max_num_batched_tokens: Number
    max_num_seqs: Number = 0  # seats: sequences in one step; 0 = not known
    namespace: Digest  # protocol.digest.namespace_digest of this worker
    kernels: Name = ""  # what computes its model: a part of the namespace
    pid: Number
    tiers: dict[Name, Name] = {}  # KV tier -> the store it shares with other workers ("" = none), fast to slow
    memory_tier: Name = HOST_TIER  # the tier in its host memory, from which peers can read
    adapters: Names = []  # LoRA adapters it serves
    serves_alone: bool = True  # whether it both computes prompts and decodes; if not, another worker does one of them
    loads_all: bool = False  # whether it loads all that its tiers have of a prompt, even where computing is faster
    max_pinned_blocks: dict[Name, Number] = {}  # the most that pins may keep, by place: "pool" or a tier

    def lends(self, holder: str) -> bool:
        """Whether peers can read from this place of the worker, by its `holder_name`: its pool or its host memory."""
        return holder.partition("/")[2] in ("", self.memory_tier)


class PoolSlots(msgspec.Struct, frozen=True, array_like=True):
    """Token slots of a worker's pool, by what they are used for. The others are free."""

    written: Number = 0  # with the KV of sequences
    reserved: Number = 0  # for tokens of sequences whose KV is not computed or has not arrived
    waste: Number = 0  # behind the last token of a sequence, in its last block
    cached: Number = 0  # in blocks that no sequence uses, but later ones may find


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a worker's queues and memory. Counts of events are since its start."""

    num_waiting: Number = 0
    num_running: Number = 0
    num_waiting_tokens: Number = 0  # prompt tokens not computed yet, waiting and running
    num_kv_tokens: Number = 0  # tokens of running sequences
    num_free_blocks: Number = 0  # unused or evictable
    pool_slots: PoolSlots = PoolSlots()
    num_free_seats: Number = 0  # neither taken by a sequence nor promised to one
    num_open_leases: Number = 0  # leases of blocks to peers that write into them, including those in quarantine
    # Blocks of ended leases and reads that a late write may still reach.
    num_quarantined_blocks: Number = 0
    # Preempted sequences, and prompts computed elsewhere that lack the blocks or the seat to be received.
    num_waiting_for_room: Number = 0
    num_preemptions: Number = 0
    num_drafted_tokens: Number = 0  # tokens that steps computed in case they come next
    num_accepted_tokens: Number = 0  # those of them that came
    num_errors: Number = 0  # errors of ours; each ended one request or one message
    num_recomputed: Number = 0  # prompts computed again because their KV arrived damaged, late or incomplete


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One KV tier of a worker. The first four counts are of this moment, the others since the start, in blocks."""

    name: Name
    num_blocks: Number = 0
    capacity_blocks: Number = 0
    num_queued_loads: Number = 0
    num_queued_stores: Number = 0
    num_hits: Number = 0  # hits and misses add up to the blocks that loads asked for
    num_misses: dict[Name, Number] = {}  # by reason
    num_stored: Number = 0
    num_drops: dict[Name, Number] = {}  # blocks that were not stored although they should have been, by reason
    num_evictions: Number = 0
    bytes_in: Number = 0
    bytes_out: Number = 0
    seconds_in: Measure = 0.0  # time in the store, summed over I/O threads
    seconds_out: Measure = 0.0
    latency_s: Measure = 0.0  # assumed fixed cost of a load
    block_s: Measure = 0.0  # learned cost of each block; inf while the tier cannot be reached


class FetchAction(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt whose KV a tier or a peer had: what was decided, and what came of it."""

    request_id: Name
    outcome: Name  # as in `FetchStats.num_prompts`
    age_s: Seconds  # since it ended
    sources: Annotated[list[Name], Meta(max_length=MAX_ACTIONS)] = []  # that the plan loads from
    num_cached_blocks: Number = 0  # found in the pool
    num_loaded_blocks: Number = 0
    predicted_s: Measure = 0.0  # until the prompt is computed, by the plan
    recompute_s: Measure = 0.0  # the same without loading
    load_s: Measure = 0.0  # predicted time of the loads alone
    actual_load_s: Measure = 0.0


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence whose blocks were given to others: it is computed again later, mostly from the cache."""

    request_id: Name
    reason: Name
    num_blocks: Number
    num_tokens: Number  # whose KV was in them
    age_s: Seconds = 0.0


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that left a pool or a tier within half a second."""

    place: Name  # "pool" or a tier
    reason: Name
    num_blocks: Number
    age_s: Seconds


class KvActions(msgspec.Struct, frozen=True, kw_only=True):
    """Why KV left a worker: totals since the start, and the latest actions, newest first."""

    num_preemptions: dict[Name, Number] = {}  # by reason
    num_evicted_blocks: dict[Name, dict[Name, Number]] = {}  # by place and reason
    preemptions: Annotated[list[Preemption], Meta(max_length=MAX_ACTIONS)] = []
    evictions: Annotated[list[Eviction], Meta(max_length=MAX_ACTIONS)] = []


class FetchStats(msgspec.Struct, frozen=True, kw_only=True):
    """Decisions of a worker about prompts whose KV a tier or a peer had, since the start."""

    num_prompts: dict[
        Name, Number
    ]  # by outcome: loaded, overtaken, failed, withdrawn, computed (loading would be slower)
    num_loaded_blocks: dict[Name, Number]  # by source: a tier, or "peer"
    num_lent_blocks: Number  # kept for peers to read
    num_copied_blocks: Number = 0  # read because a router wanted a copy of them here
    predicted_load_s: Measure  # sums, over the prompts that were loaded
    actual_load_s: Measure
    saved_s: float  # predicted time of computing minus that of loading
    latest: Annotated[list[FetchAction], Meta(max_length=MAX_ACTIONS)] = []  # newest first


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker wrote to one peer since either of them started. Failed writes are left out.

    The exposed part of a handoff is what was not written yet when its prompt was computed, `HandoffDone` included.
    """

    peer_id: Name
    num_transfers: Number = 0
    num_bytes: Number = 0
    num_saved_bytes: Number = 0  # of `num_bytes`, those that packing kept off the link
    seconds: Measure = 0.0  # packing, and the time the link was busy: see `Transfer.seconds`
    num_handoffs: Number = 0  # complete
    exposed_bytes: Number = 0
    exposed_s: Measure = 0.0
    num_lost: Number = 0  # writes with an unknown outcome, which may still land
    num_resets: Number = 0  # resets of the link because nothing moved on it


class Quarantine(msgspec.Struct, frozen=True):
    """Blocks of one sender's leases, kept out of use until it is proven that none of its writes can land in them."""

    sender: WorkerEpoch
    num_blocks: Number
    oldest_s: Measure


class PinLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps for pins."""

    num_pins: Number
    num_blocks: dict[Name, Number]  # by place: "pool" or a tier
    num_prefetched: dict[Name, Number]  # blocks since the start, by the place they were brought to


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """Work and duration of one engine step. The cost model learns from nothing else.

    `prefill_attention` is the sum over chunks of new * (context + new / 2), in tokens squared.
    """

    duration_s: Seconds
    num_prefill_tokens: Number = 0
    prefill_attention: Measure = 0.0
    num_decode_seqs: Number = 0
    num_decode_kv_tokens: Number = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A sign of life. It is sent from a thread of its own, so a long step does not silence it.

    `handoffs` names the handoffs that the sender still works on, as (request_id, generation), with generation 0 before
    their lease: receiving it extends their leases. `progress_age_s` is the time since the loop's latest turn began, or
    since the oldest unfinished step began, whichever is longer: a worker that is stuck still sends heartbeats, with a
    growing age.
    """

    worker_id: Name
    epoch: Number
    progress_age_s: Seconds
    load: WorkerLoad
    handoffs: list[tuple[Name, Number]] = []
    tiers: list[TierLoad] = []
    fetches: FetchStats | None = None
    actions: KvActions | None = None
    links: list[LinkLoad] = []  # running totals, so a lost heartbeat loses nothing
    quarantines: list[Quarantine] = []
    pins: PinLoad | None = None
    num_dropped: dict[Name, Number] = {}  # messages that were ignored, by reason: see runtime/dropped.py

    @property
    def sender(self) -> WorkerEpoch:
        """The process that lives."""
        return WorkerEpoch(self.worker_id, self.epoch)

"""Every message that crosses a process, as frozen msgspec structs in one tagged union.

Three conversations use them:

    router -> worker   Hello, Generate, Prefill, Decode, Cancel, SnapshotRequest,
                       Pin, Unpin, PinQuery                                             (ZMQ DEALER -> ROUTER)
    worker -> router   Welcome, StepOutput, RequestFailed, BlockEvents, BlockSnapshot,
                       PinReport                                                        (same sockets, back)
    worker -> worker   PeerHello, PeerRefused, LeaseRequest, LeaseQueued, LeaseGrant, LeaseRefused,
                       LeaseRevoked, LeaseClosed, ReadRequest, ReadGrant, ReadDone     (ZMQ DEALER -> ROUTER)
                       ChunkArrived, HandoffDone                                       (notified by the KV transport)
    worker -> all      Heartbeat                                          (ZMQ PUB, from its own thread)

`WIRE_VERSION` changes whenever a field changes its meaning, or what digests are; peers with another one are refused.
"""

from __future__ import annotations

import enum

import msgspec

from protocol.sampling import SamplingParams

__all__ = [
    "FINISHED_EARLY",
    "HOST_TIER",
    "INVALID_REQUEST",
    "POOL_PLACE",
    "WIRE_VERSION",
    "BlockEvents",
    "BlockSnapshot",
    "Cancel",
    "ChunkArrived",
    "Decode",
    "FetchStats",
    "FinishReason",
    "Generate",
    "HandoffDone",
    "Heartbeat",
    "Hello",
    "KvHolder",
    "LeaseClosed",
    "LeaseGrant",
    "LeaseQueued",
    "LeaseRefused",
    "LeaseRequest",
    "LeaseRevoked",
    "LinkLoad",
    "Message",
    "PeerAddress",
    "PeerHello",
    "PeerRefused",
    "Pin",
    "PinLoad",
    "PinQuery",
    "PinReport",
    "Prefetch",
    "Prefill",
    "Quarantine",
    "ReadDone",
    "ReadGrant",
    "ReadRequest",
    "RequestFailed",
    "Role",
    "SequenceDelta",
    "SnapshotRequest",
    "StepOutput",
    "StepStats",
    "TierLoad",
    "TokenLogprobs",
    "Turn",
    "Unpin",
    "Welcome",
    "WorkerCard",
    "WorkerLoad",
    "WorkerState",
    "decode_message",
    "encode_message",
    "holder_name",
    "is_readable",
    "worker_of",
]

WIRE_VERSION = 6
POOL_PLACE = "pool"  # where a worker has blocks: its pool, or one of its tiers by name
HOST_TIER = "host"  # its own memory: the tier that peers can read from, too

# `RequestFailed.code` of a request that no worker could take.
INVALID_REQUEST = "invalid_request"
# `LeaseClosed.reason` of a request that ended with its first token: there is nothing to hand over, nothing failed.
FINISHED_EARLY = "finished with the first token"


class Role(enum.StrEnum):
    """What a worker is used for now. Any engine can play any role; the role is a policy."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"  # both at once


class WorkerState(enum.StrEnum):
    """Life of a worker as its registry sees it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, is given nothing new
    DEAD = "dead"


class FinishReason(enum.StrEnum):
    """Why a sequence ended in the engine. Stop strings are the router's business: it sees text."""

    STOP = "stop"  # end-of-sequence or stop token
    LENGTH = "length"  # max_tokens or the model's context
    ABORT = "abort"  # cancelled


class Prefetch(enum.StrEnum):
    """How far up a worker brings the blocks of a pin before a request asks for them."""

    NONE = "none"
    HOST = "host"  # into host memory, from disk or object store
    POOL = "pool"  # into host memory, and once into free blocks of the pool


# -- what a worker is -----------------------------------------------------------------------------------------


class PeerAddress(msgspec.Struct, frozen=True):
    """Where a worker is reached. The epoch is new at each start of its process."""

    worker_id: str
    epoch: int
    endpoint: str  # ZMQ ROUTER socket for requests and peer messages
    heartbeat_endpoint: str  # ZMQ PUB socket


class KvHolder(msgspec.Struct, frozen=True):
    """A worker believed to have the KV of a prompt's leading blocks, in its pool or its host memory."""

    worker: PeerAddress
    num_blocks: int


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """All a router has to know of a worker to place requests on it."""

    address: PeerAddress
    role: Role
    kind: str  # workers of one kind share a cost model, e.g. "cpu-1" or "NVIDIA H200"
    model: str
    max_model_len: int
    block_size: int
    num_blocks: int
    block_bytes: int
    max_num_batched_tokens: int
    namespace: bytes  # protocol.digest.namespace_digest of this worker
    pid: int
    tiers: dict[str, str] = {}  # its KV tiers by name, fast to slow; the store each shares with others, "" = its own
    adapters: list[str] = []  # LoRA adapters it serves
    max_pinned_blocks: dict[str, int] = {}  # by place: "pool" or a tier; what pins may keep there


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a worker's queues and memory."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0  # prompt tokens not computed yet, waiting and running
    num_kv_tokens: int = 0  # tokens of running sequences
    num_free_blocks: int = 0  # unused or evictable
    num_open_leases: int = 0  # of blocks to peers that write into them, those in quarantine included
    num_quarantined_blocks: int = 0  # of leases that ended, where it is not known that nothing can land any more
    num_waiting_for_room: int = 0  # preempted sequences, and prompts computed elsewhere that cannot be received yet
    num_preemptions: int = 0  # since the start
    num_errors: int = 0  # of ours since the start, each of which ended one request or one message


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One KV tier of a worker. Counts are of blocks and since the start; the first four are of now."""

    name: str
    num_blocks: int = 0
    capacity_blocks: int = 0
    num_queued_loads: int = 0
    num_queued_stores: int = 0
    num_hits: int = 0  # hits and misses are all blocks that loads asked for
    num_misses: dict[str, int] = {}  # by reason
    num_stored: int = 0
    num_drops: dict[str, int] = {}  # blocks that were to be stored and were not, by reason
    num_evictions: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    seconds_in: float = 0.0  # of all I/O threads, in the store
    seconds_out: float = 0.0
    latency_s: float = 0.0  # learned seconds of a load beside its blocks
    block_s: float = 0.0  # and of each block; inf while the tier cannot be reached


class FetchStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker decided about prompts whose KV a tier or a peer had, since the start."""

    num_prompts: dict[str, int]  # by outcome: loaded, overtaken, failed, withdrawn, computed (loading would be slower)
    num_loaded_blocks: dict[str, int]  # by where they came from: a tier, or "peer"
    num_lent_blocks: int  # kept for peers to read
    predicted_load_s: float  # sums, over the prompts that were loaded
    actual_load_s: float
    saved_s: float  # predicted: what computing would have taken beyond loading


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker wrote to one peer since either of them started. Writes that failed are left out.

    The exposed part of a handoff is what was not written yet when its prompt was computed, `HandoffDone` included.
    """

    peer_id: str
    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # that the link was busy with it: see `Transfer.seconds`
    num_handoffs: int = 0  # complete
    exposed_bytes: int = 0
    exposed_s: float = 0.0
    num_lost: int = 0  # writes of which nobody knew whether they would still land
    num_resets: int = 0  # of the link, as nothing moved on it


class Quarantine(msgspec.Struct, frozen=True):
    """Blocks of one sender's leases that wait for the proof that nothing of it can land in them any more."""

    sender_id: str
    sender_epoch: int
    num_blocks: int
    oldest_s: float


class PinLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps for pins."""

    num_pins: int
    num_blocks: dict[str, int]  # by place: "pool" or a tier
    num_prefetched: dict[str, int]  # blocks since the start, by place they were brought to


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step did and how long it took: the cost model's only teacher.

    `prefill_attention` is the sum over chunks of new * (context + new / 2), in tokens squared.
    """

    duration_s: float
    num_prefill_tokens: int = 0
    prefill_attention: float = 0.0
    num_decode_seqs: int = 0
    num_decode_kv_tokens: int = 0


# -- router -> worker ------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message of a router; the worker answers `Welcome` and sends it events from then on."""

    router_id: str
    wire_version: int = WIRE_VERSION


class Turn(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a prompt is computed, of those that one worker has; one that is begun is overtaken between two steps."""

    order: float = 0.0  # the smallest first, equal ones as they came
    max_step_tokens: int = 0  # it joins no step with more prompt tokens, so that it is soon overtaken; 0 = any step


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Do the whole request on this worker: prefill and decode."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str = ""
    kv_holder: KvHolder | None = None  # if another worker has more of the prompt
    turn: Turn = Turn()


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute the prompt, send the first token to the router and the KV to `decode_worker`."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    decode_worker: PeerAddress
    cache_salt: str = ""
    kv_holder: KvHolder | None = None
    turn: Turn = Turn()


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reserve room for the prompt's KV, let `prefill_worker` fill it, then decode."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    prefill_worker: PeerAddress
    cache_salt: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop working on the request and free what it holds; unknown ids are ignored."""

    request_id: str


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for all digests in these places of a worker, after a gap in its events."""

    places: list[str]


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep the leading blocks of this chain from eviction for `ttl_s`, those that come later included.

    Sent again under the same id it replaces the chain and the time. A worker keeps what its own bound allows.
    """

    pin_id: str
    digests: list[bytes]
    ttl_s: float
    prefetch: Prefetch = Prefetch.NONE


class Unpin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a pin before its time; unknown ids are ignored."""

    pin_id: str


class PinQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how much of some pins is here; answered by `PinReport`."""

    query_id: str
    pin_ids: list[str]


# -- worker -> router ------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `Hello`. A worker that speaks another wire version sets `refusal`."""

    card: WorkerCard
    refusal: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one chosen token and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class SequenceDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request. `offset` counts the output tokens before these.

    The first token comes from the prefill worker and the rest from the decode worker, over two sockets:
    the offset lets the router put them in order.
    """

    request_id: str
    offset: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int | None = None  # with the first token: prompt tokens not computed
    logprobs: list[TokenLogprobs] | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything one engine step produced for this router, in one message."""

    worker_id: str
    epoch: int
    deltas: list[SequenceDelta]
    stats: StepStats
    load: WorkerLoad


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker gave the request up; nothing of it is left there."""

    request_id: str
    message: str
    code: str


def holder_name(worker_id: str, place: str) -> str:
    """What a place of a worker is called in the index: its pool goes by the worker's own name."""
    return worker_id if place == POOL_PLACE else f"{worker_id}/{place}"


def is_readable(holder: str) -> bool:
    """Whether peers can read from this place of a worker: its pool, or its host memory."""
    place = holder.partition("/")[2]
    return place in ("", HOST_TIER)


def worker_of(holder: str) -> str:
    """The worker of a `holder_name`."""
    return holder.partition("/")[0]


class BlockEvents(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cached blocks that came to a place and went. `sequence` counts the messages of a place in an epoch, from 1."""

    worker_id: str
    epoch: int
    sequence: int
    stored: list[bytes]
    removed: list[bytes]
    place: str = POOL_PLACE

    @property
    def holder(self) -> str:
        """Whose blocks they are, in the index."""
        return holder_name(self.worker_id, self.place)


class BlockSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All digests in a place now; its events up to and including `sequence` are contained."""

    worker_id: str
    epoch: int
    sequence: int
    digests: list[bytes]
    place: str = POOL_PLACE

    @property
    def holder(self) -> str:
        """Whose blocks they are, in the index."""
        return holder_name(self.worker_id, self.place)


class PinReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `PinQuery`: leading blocks of each pin's chain, by place ("pool" or a tier). Without unknown ids."""

    query_id: str
    held: dict[str, dict[str, int]]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """I am alive. Sent from a thread of its own, so a long step does not silence it.

    `handoffs` names the handoffs the sender still works on, as (request_id, generation), 0 before their lease:
    receiving it extends their leases. `step_age_s` is the age of the running step, 0 when idle: it tells a stuck loop
    from a slow one.
    """

    worker_id: str
    epoch: int
    step_age_s: float
    load: WorkerLoad
    handoffs: list[tuple[str, int]] = []
    tiers: list[TierLoad] = []
    fetches: FetchStats | None = None
    links: list[LinkLoad] = []  # counts, so a heartbeat that is lost loses nothing
    quarantines: list[Quarantine] = []
    pins: PinLoad | None = None


# -- worker -> worker ------------------------------------------------------------------------------------------


class PeerHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Opens a link: who I am, what must agree, and (only once it agrees) how my pool is reached."""

    sender: PeerAddress
    compatibility: dict[str, str]
    wire_version: int = WIRE_VERSION
    transport_metadata: bytes = b""
    is_reply: bool = False


class PeerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The link was refused; `reason` names each field that differs."""

    sender: PeerAddress
    reason: str


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill -> decode: this prompt's KV comes soon, lend blocks for it. May come before the `Decode` it is about."""

    sender: PeerAddress
    request_id: str


class LeaseQueued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: these requests for a lease are in line for room. Sent again and again while they are."""

    sender: PeerAddress
    request_ids: list[str]


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: write the prompt's blocks from `first_block` on into `block_ids`, before `ttl_s` is over."""

    sender: PeerAddress
    request_id: str
    generation: int
    first_block: int  # blocks before this one are already cached at the receiver
    block_ids: list[int]
    ttl_s: float


class LeaseRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: no lease will come for this request; drop it."""

    sender: PeerAddress
    request_id: str
    reason: str


class LeaseRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: stop writing under this lease and answer `LeaseClosed`."""

    sender: PeerAddress
    request_id: str
    generation: int


class LeaseClosed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill -> decode: no write under this lease is in flight or will be started."""

    sender: PeerAddress
    request_id: str
    generation: int
    reason: str = ""


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reader -> holder: keep these blocks of a chain, those that are there, for `ttl_s` and say where they lie."""

    sender: PeerAddress
    read_id: int
    digests: list[bytes]
    parent: bytes | None = None  # digest of the block before them
    ttl_s: float


class ReadGrant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Holder -> reader: the leading blocks asked for lie here and stay as they are, from now on for `ttl_s`.

    `checksums` as in `ChunkArrived`.
    """

    sender: PeerAddress
    read_id: int
    block_ids: list[int]
    checksums: list[bytes] = []


class ReadDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reader -> holder: nothing of this read is under way any more.

    With `has_copy` the reader keeps what it read, so the holder's copy is one too many.
    """

    sender: PeerAddress
    read_id: int
    has_copy: bool = False


class ChunkArrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rides with a write: these blocks (indices within the prompt) are in place now.

    `checksums` are one digest per block of its bytes; empty when checking is off.
    """

    request_id: str
    generation: int
    first_block: int
    num_blocks: int
    checksums: list[bytes] = []


class HandoffDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rides behind the last write: prefill is complete, this is the first token (already sent to the router)."""

    request_id: str
    generation: int
    first_token_id: int


Message = (
    Hello
    | Generate
    | Prefill
    | Decode
    | Cancel
    | SnapshotRequest
    | Pin
    | Unpin
    | PinQuery
    | Welcome
    | StepOutput
    | RequestFailed
    | BlockEvents
    | BlockSnapshot
    | PinReport
    | Heartbeat
    | PeerHello
    | PeerRefused
    | LeaseRequest
    | LeaseGrant
    | LeaseQueued
    | LeaseRefused
    | LeaseRevoked
    | LeaseClosed
    | ReadRequest
    | ReadGrant
    | ReadDone
    | ChunkArrived
    | HandoffDone
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode_message(message: Message) -> bytes:
    """Message as bytes; the struct's name travels as its tag."""
    return _encoder.encode(message)


def decode_message(data: bytes | memoryview) -> Message:
    """Message of these bytes. Raises `msgspec.ValidationError` for anything else."""
    return _decoder.decode(data)

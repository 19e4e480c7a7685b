"""Every message that crosses a process, as frozen msgspec structs in one tagged union.

Four conversations use them:

    router -> worker   Hello, Introduce, Generate, Prefill, Decode, Cancel, SnapshotRequest,
                       Pin, Unpin, PinQuery                                             (ZMQ DEALER -> ROUTER)
    worker -> router   Welcome, StepOutput, RequestFailed, BlockEvents, BlockSnapshot,
                       PinReport                                                        (same sockets, back)
    worker -> worker   PeerHello, PeerRefused, LeaseRequest, LeaseQueued, LeaseGrant, LeaseRefused,
                       LeaseRevoked, LeaseClosed, ReadRequest, ReadGrant, ReadDone     (ZMQ DEALER -> ROUTER)
                       ChunkArrived, HandoffDone                                       (notified by the KV transport)
    worker -> all      Heartbeat                                          (ZMQ PUB, from its own thread)

Each conversation has a decoder of its own, so nobody can say what is for others to say. Decoding checks lengths and
bounds: a value that would be harmful by its size, a NaN or a negative count does not decode. What a value may be in its
context (block ids of this pool, tokens of this model) is for the receiver to check.

`WIRE_VERSION` changes whenever a field changes its meaning, or what digests are; peers with another one are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from typing_extensions import Buffer

from tandem.protocol.decoding import safe_decoder
from tandem.protocol.digest import DIGEST_BYTES
from tandem.protocol.sampling import SamplingParams

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
    "Introduce",
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
    "PeerMessage",
    "PeerRefused",
    "Pin",
    "PinLoad",
    "PinQuery",
    "PinReport",
    "Prefetch",
    "Prefill",
    "PrefillPriority",
    "Quarantine",
    "ReadDone",
    "ReadGrant",
    "ReadRequest",
    "RequestFailed",
    "Role",
    "RouterMessage",
    "SequenceDelta",
    "SnapshotRequest",
    "StepOutput",
    "StepStats",
    "TierLoad",
    "TokenLogprobs",
    "Unpin",
    "Welcome",
    "WorkerCard",
    "WorkerLoad",
    "WorkerMessage",
    "WorkerState",
    "WriteMessage",
    "decode_heartbeat",
    "decode_message",
    "decode_peer_message",
    "decode_router_message",
    "decode_worker_message",
    "decode_write_message",
    "encode_message",
    "holder_name",
    "is_readable",
    "request_id_of",
    "worker_of",
]

WIRE_VERSION = 7
POOL_PLACE = "pool"  # where a worker has blocks: its pool, or one of its tiers by name
HOST_TIER = "host"  # its own memory: the tier that peers can read from, too

# `RequestFailed.code` of a request that no worker could take.
INVALID_REQUEST = "invalid_request"
# `LeaseClosed.reason` of a request that ended with its first token: there is nothing to hand over, nothing failed.
FINISHED_EARLY = "finished with the first token"

_MAX_INT = 2**63 - 1
_MAX_ITEMS = 1 << 24  # of a list: tokens of a prompt, blocks of a handoff
_MAX_DIGESTS = 1 << 26  # blocks of a tier

Name = Annotated[str, Meta(max_length=1024)]  # ids and names
Names = Annotated[list[Name], Meta(max_length=1 << 20)]
Text = Annotated[str, Meta(max_length=1 << 16)]  # for people to read
Number = Annotated[int, Meta(ge=0, le=_MAX_INT)]  # counts, ids, epochs, sequence numbers
BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Measure = Annotated[float, Meta(ge=0)]  # statistics; infinite where something cannot be reached
Lifetime = Annotated[float, Meta(gt=0, le=1e6)]  # seconds
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
Digests = Annotated[list[Digest], Meta(max_length=_MAX_DIGESTS)]
BlockIds = Annotated[list[BlockId], Meta(max_length=_MAX_ITEMS)]
Checksums = Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=_MAX_ITEMS)]
TokenIds = Annotated[list[int], Meta(max_length=_MAX_ITEMS)]  # NOTE: the engine knows which ids there are


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

    worker_id: Name
    epoch: Number
    endpoint: Name  # ZMQ ROUTER socket for requests and peer messages
    heartbeat_endpoint: Name  # ZMQ PUB socket
    public_key: Name = ""  # who answers there: see runtime/curve.py


class KvHolder(msgspec.Struct, frozen=True):
    """A worker believed to have the KV of a prompt's leading blocks, in its pool or its host memory."""

    worker: PeerAddress
    num_blocks: Number


class WorkerCard(msgspec.Struct, frozen=True, kw_only=True):
    """All a router has to know of a worker to place requests on it."""

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
    pid: Number
    tiers: dict[Name, Name] = {}  # its KV tiers by name, fast to slow; the store each shares with others, "" = its own
    adapters: Names = []  # LoRA adapters it serves
    max_pinned_blocks: dict[Name, Number] = {}  # by place: "pool" or a tier; what pins may keep there


class WorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a worker's queues and memory."""

    num_waiting: Number = 0
    num_running: Number = 0
    num_waiting_tokens: Number = 0  # prompt tokens not computed yet, waiting and running
    num_kv_tokens: Number = 0  # tokens of running sequences
    num_free_blocks: Number = 0  # unused or evictable
    num_free_seats: Number = 0  # that no sequence has and none was promised
    num_open_leases: Number = 0  # of blocks to peers that write into them, those in quarantine included
    # Of ended leases and reads, where it is not known that nothing can land any more.
    num_quarantined_blocks: Number = 0
    # Preempted sequences, and prompts computed elsewhere that cannot be received yet for want of blocks or a seat.
    num_waiting_for_room: Number = 0
    num_preemptions: Number = 0  # since the start
    num_errors: Number = 0  # of ours since the start, each of which ended one request or one message
    num_recomputed: Number = 0  # since the start, prompts computed again as their KV arrived damaged, late or in part


class TierLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One KV tier of a worker. Counts are of blocks and since the start; the first four are of now."""

    name: Name
    num_blocks: Number = 0
    capacity_blocks: Number = 0
    num_queued_loads: Number = 0
    num_queued_stores: Number = 0
    num_hits: Number = 0  # hits and misses are all blocks that loads asked for
    num_misses: dict[Name, Number] = {}  # by reason
    num_stored: Number = 0
    num_drops: dict[Name, Number] = {}  # blocks that were to be stored and were not, by reason
    num_evictions: Number = 0
    bytes_in: Number = 0
    bytes_out: Number = 0
    seconds_in: Measure = 0.0  # of all I/O threads, in the store
    seconds_out: Measure = 0.0
    latency_s: Measure = 0.0  # learned seconds of a load beside its blocks
    block_s: Measure = 0.0  # and of each block; inf while the tier cannot be reached


class FetchStats(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker decided about prompts whose KV a tier or a peer had, since the start."""

    num_prompts: dict[
        Name, Number
    ]  # by outcome: loaded, overtaken, failed, withdrawn, computed (loading would be slower)
    num_loaded_blocks: dict[Name, Number]  # by where they came from: a tier, or "peer"
    num_lent_blocks: Number  # kept for peers to read
    predicted_load_s: Measure  # sums, over the prompts that were loaded
    actual_load_s: Measure
    saved_s: float  # predicted: what computing would have taken beyond loading


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker wrote to one peer since either of them started. Writes that failed are left out.

    The exposed part of a handoff is what was not written yet when its prompt was computed, `HandoffDone` included.
    """

    peer_id: Name
    num_transfers: Number = 0
    num_bytes: Number = 0
    seconds: Measure = 0.0  # that the link was busy with it: see `Transfer.seconds`
    num_handoffs: Number = 0  # complete
    exposed_bytes: Number = 0
    exposed_s: Measure = 0.0
    num_lost: Number = 0  # writes of which nobody knew whether they would still land
    num_resets: Number = 0  # of the link, as nothing moved on it


class Quarantine(msgspec.Struct, frozen=True):
    """Blocks of one sender's leases that wait for the proof that nothing of it can land in them any more."""

    sender_id: Name
    sender_epoch: Number
    num_blocks: Number
    oldest_s: Measure


class PinLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker keeps for pins."""

    num_pins: Number
    num_blocks: dict[Name, Number]  # by place: "pool" or a tier
    num_prefetched: dict[Name, Number]  # blocks since the start, by place they were brought to


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step did and how long it took: the cost model's only teacher.

    `prefill_attention` is the sum over chunks of new * (context + new / 2), in tokens squared.
    """

    duration_s: Seconds
    num_prefill_tokens: Number = 0
    prefill_attention: Measure = 0.0
    num_decode_seqs: Number = 0
    num_decode_kv_tokens: Number = 0


# -- router -> worker ------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message of a router; the worker answers `Welcome` and sends it events from then on."""

    router_id: Name
    wire_version: Number = WIRE_VERSION


class Introduce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These workers are of this cluster: they may connect, and what they say in their own name may be acted upon."""

    peers: list[PeerAddress]


class PrefillPriority(msgspec.Struct, frozen=True, omit_defaults=True):
    """When a prompt is computed, of those that one worker has; one that is begun is overtaken between two steps."""

    order: Annotated[float, Meta(ge=-1e300)] = 0.0  # the smallest first, equal ones as they came
    max_step_tokens: Number = 0  # it joins no step with more prompt tokens, so that it is soon overtaken; 0 = any step


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Do the whole request on this worker: prefill and decode."""

    request_id: Name
    token_ids: TokenIds
    sampling: SamplingParams
    cache_salt: str = ""
    kv_holder: KvHolder | None = None  # if another worker has more of the prompt
    priority: PrefillPriority = PrefillPriority()


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compute the prompt, send the first token to the router and the KV to `decode_worker`."""

    request_id: Name
    token_ids: TokenIds
    sampling: SamplingParams
    decode_worker: PeerAddress
    cache_salt: str = ""
    kv_holder: KvHolder | None = None
    priority: PrefillPriority = PrefillPriority()


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reserve room for the prompt's KV, let `prefill_worker` fill it, then decode."""

    request_id: Name
    token_ids: TokenIds
    sampling: SamplingParams
    prefill_worker: PeerAddress
    cache_salt: str = ""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop working on the request and free what it holds; unknown ids are ignored."""

    request_id: Name


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for all digests in these places of a worker, after a gap in its events."""

    places: Names


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Keep the leading blocks of this chain from eviction for `ttl_s`, those that come later included.

    Sent again under the same id it replaces the chain and the time. A worker keeps what its own bound allows.
    """

    pin_id: Name
    digests: Digests
    ttl_s: Annotated[float, Meta(ge=-1e9, lt=1e9)]
    prefetch: Prefetch = Prefetch.NONE


class Unpin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a pin before its time; unknown ids are ignored."""

    pin_id: Name


class PinQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how much of some pins is here; answered by `PinReport`."""

    query_id: Name
    pin_ids: Names


# -- worker -> router ------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `Hello`. A worker that speaks another wire version sets `refusal`."""

    card: WorkerCard
    refusal: Text = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of one chosen token and of the best alternatives, best first."""

    token_id: Number
    logprob: float
    top: list[tuple[int, float]] = []


class SequenceDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """New tokens of one request. `offset` counts the output tokens before these.

    The first token comes from the prefill worker and the rest from the decode worker, over two sockets:
    the offset lets the router put them in order.
    """

    request_id: Name
    offset: Number
    token_ids: TokenIds
    finish_reason: FinishReason | None = None
    stop_token_id: Number | None = None
    num_cached_tokens: Number | None = None  # with the first token: prompt tokens not computed
    logprobs: list[TokenLogprobs] | None = None


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything one engine step produced for this router, in one message.

    Or first tokens that were held until their prompts had a lease; then `stats` are of no work.
    """

    worker_id: Name
    epoch: Number
    deltas: list[SequenceDelta]
    stats: StepStats
    load: WorkerLoad


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker gave the request up; nothing of it is left there."""

    request_id: Name
    message: Text
    code: Name


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

    worker_id: Name
    epoch: Number
    sequence: Number
    stored: Digests
    removed: Digests
    place: Name = POOL_PLACE

    @property
    def holder(self) -> str:
        """Whose blocks they are, in the index."""
        return holder_name(self.worker_id, self.place)


class BlockSnapshot(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All digests in a place now; its events up to and including `sequence` are contained."""

    worker_id: Name
    epoch: Number
    sequence: Number
    digests: Digests
    place: Name = POOL_PLACE

    @property
    def holder(self) -> str:
        """Whose blocks they are, in the index."""
        return holder_name(self.worker_id, self.place)


class PinReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `PinQuery`: leading blocks of each pin's chain, by place ("pool" or a tier). Without unknown ids."""

    query_id: Name
    held: dict[Name, dict[Name, Number]]


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """I am alive. Sent from a thread of its own, so a long step does not silence it.

    `handoffs` names the handoffs the sender still works on, as (request_id, generation), 0 before their lease:
    receiving it extends their leases. `step_age_s` is the age of the running step, 0 when idle: it tells a stuck loop
    from a slow one.
    """

    worker_id: Name
    epoch: Number
    step_age_s: Seconds
    load: WorkerLoad
    handoffs: list[tuple[Name, Number]] = []
    tiers: list[TierLoad] = []
    fetches: FetchStats | None = None
    links: list[LinkLoad] = []  # counts, so a heartbeat that is lost loses nothing
    quarantines: list[Quarantine] = []
    pins: PinLoad | None = None
    num_dropped: dict[Name, Number] = {}  # messages that were not acted upon, by reason: see runtime/dropped.py


# -- worker -> worker ------------------------------------------------------------------------------------------


class PeerHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Opens a link: who I am, what must agree, and (only once it agrees) how my pool is reached."""

    sender: PeerAddress
    compatibility: Annotated[dict[Name, Name], Meta(max_length=64)]
    wire_version: Number = WIRE_VERSION
    transport_metadata: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    is_reply: bool = False


class PeerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The link was refused; `reason` names each field that differs, without its value."""

    sender: PeerAddress
    reason: Text


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill -> decode: this prompt's KV comes soon, lend blocks for it. May come before the `Decode` it is about."""

    sender: PeerAddress
    request_id: Name


class LeaseQueued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: these requests for a lease are in line for room. Sent again and again while they are."""

    sender: PeerAddress
    request_ids: Names


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: write the prompt's blocks from `first_block` on into `block_ids`, before `ttl_s` is over."""

    sender: PeerAddress
    request_id: Name
    generation: Number
    first_block: Number  # blocks before this one are already cached at the receiver
    block_ids: BlockIds
    ttl_s: Lifetime


class LeaseRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: no lease will come for this request; drop it."""

    sender: PeerAddress
    request_id: Name
    reason: Text


class LeaseRevoked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: stop writing under this lease and answer `LeaseClosed`."""

    sender: PeerAddress
    request_id: Name
    generation: Number


class LeaseClosed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill -> decode: no write under this lease is in flight or will be started.

    `first_token_id` is set where everything was written and `HandoffDone` sent, of which the receiver may know nothing.
    """

    sender: PeerAddress
    request_id: Name
    generation: Number
    reason: Text = ""
    first_token_id: Number | None = None


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reader -> holder: keep these blocks of a chain, those that are there, for `ttl_s` and say where they lie."""

    sender: PeerAddress
    read_id: Number
    digests: Digests
    parent: Digest | None = None  # digest of the block before them
    ttl_s: Lifetime


class ReadGrant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Holder -> reader: the leading blocks asked for lie here and stay as they are, from now on for `ttl_s`.

    `checksums` as in `ChunkArrived`.
    """

    sender: PeerAddress
    read_id: Number
    block_ids: BlockIds
    checksums: Checksums = []


class ReadDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reader -> holder: nothing of this read is under way any more.

    With `has_copy` the reader keeps what it read, so the holder's copy is one too many.
    """

    sender: PeerAddress
    read_id: Number
    has_copy: bool = False


class ChunkArrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rides with a write: these blocks (indices within the prompt) are in place now.

    `checksums` are one digest per block of its bytes; empty when checking is off.
    """

    request_id: Name
    generation: Number
    first_block: Number
    num_blocks: Number
    checksums: Checksums = []


class HandoffDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Rides behind the last write: prefill is complete, this is the first token (already sent to the router)."""

    request_id: Name
    generation: Number
    first_token_id: Number


RouterMessage = Hello | Introduce | Generate | Prefill | Decode | Cancel | SnapshotRequest | Pin | Unpin | PinQuery
WorkerMessage = Welcome | StepOutput | RequestFailed | BlockEvents | BlockSnapshot | PinReport
PeerMessage = (
    PeerHello
    | PeerRefused
    | LeaseRequest
    | LeaseQueued
    | LeaseGrant
    | LeaseRefused
    | LeaseRevoked
    | LeaseClosed
    | ReadRequest
    | ReadGrant
    | ReadDone
)
WriteMessage = ChunkArrived | HandoffDone
Message = RouterMessage | WorkerMessage | PeerMessage | WriteMessage | Heartbeat


class _Request(msgspec.Struct):
    type: Literal["Generate", "Prefill", "Decode"]
    request_id: Name


encode_message: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
_decode_request: Callable[[Buffer], _Request] = safe_decoder(_Request)

# Each takes bytes or a memoryview, and raises `msgspec.DecodeError` for all that is not a valid message of its kind.
decode_message: Callable[[Buffer], Message] = safe_decoder(Message)
decode_router_message: Callable[[Buffer], RouterMessage] = safe_decoder(RouterMessage)
decode_worker_message: Callable[[Buffer], WorkerMessage] = safe_decoder(WorkerMessage)
decode_peer_message: Callable[[Buffer], PeerMessage] = safe_decoder(PeerMessage)
decode_write_message: Callable[[Buffer], WriteMessage] = safe_decoder(WriteMessage)
decode_heartbeat: Callable[[Buffer], Heartbeat] = safe_decoder(Heartbeat)


def request_id_of(data: Buffer) -> str | None:
    """The request that a message would have begun, had it decoded; None if it would have begun none."""
    try:
        return _decode_request(data).request_id
    except msgspec.DecodeError:
        return None

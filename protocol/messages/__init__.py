"""Every message between processes, as frozen msgspec structs in tagged unions.

    router -> worker   router_to_worker.py                                (ZMQ DEALER -> ROUTER)
    worker -> router   worker_to_router.py                                (same sockets, back)
    worker -> worker   worker_to_worker.py                                (ZMQ DEALER -> ROUTER)
                       ChunkArrived, HandoffDone                          (notifications of the KV transport)
    worker -> all      Heartbeat                                          (ZMQ PUB, from its own thread)

Each direction has its own decoder, so no process can send a message that only another may send. Decoding checks lengths
and bounds: values of harmful size, NaN and negative counts do not decode. The receiver checks what depends on its
context, such as block ids of its pool and tokens of its model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from typing_extensions import Buffer

from tandem.protocol.decoding import safe_decoder
from tandem.protocol.messages.fields import MAX_RUN_DIGESTS, WIRE_VERSION, FirstTokens, Name
from tandem.protocol.messages.places import DISK_TIER, HOST_TIER, POOL_PLACE, holder_name, worker_of
from tandem.protocol.messages.router_to_worker import (
    Cancel,
    CopyKv,
    Decode,
    Fork,
    Generate,
    Hello,
    Introduce,
    Pin,
    PinQuery,
    Prefetch,
    Prefill,
    SnapshotRequest,
    TurnEnd,
    Unpin,
    WorkerPriority,
    prompt_fields,
)
from tandem.protocol.messages.worker import (
    MAX_ACTIONS,
    Eviction,
    FetchAction,
    FetchStats,
    Heartbeat,
    KvActions,
    KvHolder,
    LinkLoad,
    PeerAddress,
    PinLoad,
    PoolSlots,
    Preemption,
    Quarantine,
    Role,
    StepStats,
    TierLoad,
    WorkerCard,
    WorkerEpoch,
    WorkerLoad,
    WorkerState,
)
from tandem.protocol.messages.worker_to_router import (
    CANCELLED,
    INVALID_REQUEST,
    BlockEvents,
    BlockSnapshot,
    FinishReason,
    PinReport,
    PromptLogprobs,
    RequestFailed,
    SequenceDelta,
    StepOutput,
    TokenLogprobs,
    Welcome,
)
from tandem.protocol.messages.worker_to_worker import (
    FINISHED_EARLY,
    ChunkArrived,
    HandoffDone,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    PeerHello,
    PeerRefused,
    ReadDone,
    ReadGrant,
    ReadRequest,
    WriteBegun,
)

RequestPart = Generate | Prefill | Decode | CopyKv  # what a worker does for a request, until it says that it is done
RouterMessage = Hello | Introduce | RequestPart | Cancel | TurnEnd | SnapshotRequest | Pin | Unpin | PinQuery
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
    | WriteBegun
    | ReadRequest
    | ReadGrant
    | ReadDone
)
WriteMessage = ChunkArrived | HandoffDone
Message = RouterMessage | WorkerMessage | PeerMessage | WriteMessage | Heartbeat


class _Fork(msgspec.Struct, array_like=True):
    request_id: Name


class _Request(msgspec.Struct):
    type: Literal["Generate", "Prefill", "Decode", "CopyKv"]
    request_id: Name
    forks: list[_Fork] = []


encode_message: Callable[[Message], bytes] = msgspec.msgpack.Encoder().encode
_decode_request: Callable[[Buffer], _Request] = safe_decoder(_Request)

# Decoders take bytes or a memoryview and raise `msgspec.DecodeError` for anything but a valid message of their kind.
decode_message: Callable[[Buffer], Message] = safe_decoder(Message)
decode_router_message: Callable[[Buffer], RouterMessage] = safe_decoder(RouterMessage)
decode_worker_message: Callable[[Buffer], WorkerMessage] = safe_decoder(WorkerMessage)
decode_peer_message: Callable[[Buffer], PeerMessage] = safe_decoder(PeerMessage)
decode_write_message: Callable[[Buffer], WriteMessage] = safe_decoder(WriteMessage)
decode_heartbeat: Callable[[Buffer], Heartbeat] = safe_decoder(Heartbeat)


def request_ids_of(data: Buffer) -> list[str]:
    """The request that an invalid message would have started, and its forks, if it was meant to start any."""
    try:
        request = _decode_request(data)
    except msgspec.DecodeError:
        return []
    return [request.request_id, *(fork.request_id for fork in request.forks)]

from __future__ import annotations

import typing

import msgspec
import pytest

from tandem.protocol import messages
from tandem.protocol.messages import (
    BlockEvents,
    BlockSnapshot,
    Cancel,
    ChunkArrived,
    CopyKv,
    Decode,
    FinishReason,
    Generate,
    HandoffDone,
    Heartbeat,
    Hello,
    Introduce,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    Message,
    PeerAddress,
    PeerHello,
    PeerRefused,
    Pin,
    PinQuery,
    PinReport,
    Prefetch,
    Prefill,
    ReadDone,
    ReadGrant,
    ReadRequest,
    RequestFailed,
    Role,
    SequenceDelta,
    SnapshotRequest,
    StepOutput,
    StepStats,
    TokenLogprobs,
    Unpin,
    Welcome,
    WorkerCard,
    WorkerLoad,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams

PEER = PeerAddress("d0", 7, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "k" * 40)
SAMPLING = SamplingParams(max_tokens=3, seed=2**63, stop_token_ids=(1, 2), logit_bias={5: -1.5}, num_logprobs=0)
LOAD = WorkerLoad(num_waiting=1, num_free_blocks=9)
CARD = WorkerCard(
    address=PEER,
    role=Role.DECODE,
    kind="cpu-1",
    model="m",
    max_model_len=64,
    block_size=16,
    num_blocks=4,
    block_bytes=1024,
    max_num_batched_tokens=32,
    namespace=b"\x00\xff" * 8,
    pid=1,
)
DELTA = SequenceDelta(
    "r", 0, [5], FinishReason.STOP, 5, num_cached_tokens=0, logprobs=[TokenLogprobs(5, -0.5, [(5, -0.5), (6, -1.0)])]
)

EXAMPLES: list[Message] = [
    Hello(router_id="router"),
    Introduce(peers=[PEER]),
    Generate(request_id="r", token_ids=[1, 2**32 - 1], sampling=SAMPLING, cache_salt="s"),
    Prefill(request_id="r", token_ids=[1], sampling=SAMPLING, decode_worker=PEER),
    Decode(request_id="r", token_ids=[1], sampling=SAMPLING, prefill_worker=PEER),
    CopyKv(request_id="r", digests=[b"d" * 16], source=PEER),
    Cancel(request_id="r"),
    SnapshotRequest(places=["pool"]),
    Welcome(card=CARD, refusal="no"),
    StepOutput(worker_id="d0", epoch=7, deltas=[DELTA], stats=StepStats(duration_s=0.5), load=LOAD),
    RequestFailed(request_id="r", message="gone", code="worker_failed"),
    BlockEvents(worker_id="d0", epoch=7, sequence=1, stored=[b"a" * 16], removed=[b"b" * 16]),
    BlockSnapshot(worker_id="d0", epoch=7, sequence=1, digests=[b"a" * 16]),
    Heartbeat(worker_id="d0", epoch=7, progress_age_s=0.0, load=LOAD, handoffs=[("r", 3)]),
    PeerHello(sender=PEER, compatibility={"codec": "raw"}, transport_metadata=b"\x00\x01", is_reply=True),
    PeerRefused(sender=PEER, reason="codec"),
    LeaseGrant(sender=PEER, request_id="r", generation=1, first_block=2, block_ids=[3, 4], ttl_s=1.5),
    LeaseRequest(sender=PEER, request_id="r"),
    LeaseQueued(sender=PEER, request_ids=["r"]),
    LeaseRefused(sender=PEER, request_id="r", reason="full"),
    LeaseRevoked(sender=PEER, request_id="r", generation=1),
    LeaseClosed(sender=PEER, request_id="r", generation=1),
    ReadRequest(sender=PEER, read_id=1, digests=[b"d" * 16], ttl_s=5.0),
    ReadGrant(sender=PEER, read_id=1, block_ids=[3, 4], checksums=[b"c", b""]),
    ReadDone(sender=PEER, read_id=1),
    Pin(pin_id="p", digests=[b"d" * 16], ttl_s=5.0, prefetch=Prefetch.POOL),
    Unpin(pin_id="p"),
    PinQuery(query_id="q", pin_ids=["p"]),
    PinReport(query_id="q", held={"p": {"pool": 3}}),
    ChunkArrived(request_id="r", generation=1, first_block=0, num_blocks=1, checksums=[b"c"]),
    HandoffDone(request_id="r", generation=1, first_token_id=9),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: Message) -> None:
    encoded = encode_message(message)
    assert decode_message(encoded) == message
    assert decode_message(memoryview(encoded)) == message


def test_every_message_type_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(typing.get_args(Message))


def test_every_message_type_is_exported() -> None:
    assert {kind.__name__ for kind in typing.get_args(Message)} <= set(messages.__all__)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"request_id": "r"}),
        msgspec.msgpack.encode({"type": "Cancel"}),
        msgspec.msgpack.encode({"type": "Cancel", "request_id": 5}),
        encode_message(EXAMPLES[2])[:-1],
        encode_message(EXAMPLES[0]).replace(b"router", b"\xff\xfe\xfd\xfc\xfb\xfa"),  # no UTF-8
        b"\x91" * 100_000,  # nested too deep
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(data)


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[5].request_id = "other"  # type: ignore[union-attr, misc]

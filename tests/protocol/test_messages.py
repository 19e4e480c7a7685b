from __future__ import annotations

import typing

import msgspec
import pytest

from tandem.protocol import messages
from tandem.protocol.sampling import SamplingParams

PEER = messages.PeerAddress("d0", 7, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", "k" * 40)
SAMPLING = SamplingParams(max_tokens=3, seed=2**63, stop_token_ids=(1, 2), logit_bias={5: -1.5}, num_logprobs=0)
LOAD = messages.WorkerLoad(num_waiting=1, num_free_blocks=9)
CARD = messages.WorkerCard(
    address=PEER,
    role=messages.Role.DECODE,
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
DELTA = messages.SequenceDelta(
    "r",
    0,
    [5],
    messages.FinishReason.STOP,
    5,
    num_cached_tokens=0,
    logprobs=[messages.TokenLogprobs(5, -0.5, [(5, -0.5), (6, -1.0)])],
)

EXAMPLES: list[messages.Message] = [
    messages.Hello(router_id="router"),
    messages.Introduce(peers=[PEER]),
    messages.Generate(request_id="r", token_ids=[1, 2**32 - 1], sampling=SAMPLING, cache_salt="s"),
    messages.Prefill(request_id="r", token_ids=[1], sampling=SAMPLING, decode_worker=PEER),
    messages.Decode(request_id="r", token_ids=[1], sampling=SAMPLING, prefill_worker=PEER),
    messages.CopyKv(request_id="r", digests=[b"d" * 16], source=PEER),
    messages.Cancel(request_id="r"),
    messages.TurnEnd(digests=[b"d" * 16], has_calls=True),
    messages.SnapshotRequest(places=["pool"]),
    messages.Welcome(card=CARD, refusal="no"),
    messages.StepOutput(worker_id="d0", epoch=7, deltas=[DELTA], stats=messages.StepStats(duration_s=0.5), load=LOAD),
    messages.RequestFailed(request_id="r", message="gone", code="worker_failed"),
    messages.BlockEvents(worker_id="d0", epoch=7, sequence=1, stored=b"a" * 32, removed=b"b" * 16),
    messages.BlockSnapshot(worker_id="d0", epoch=7, sequence=1, digests=b"a" * 16, part=3, is_last=False),
    messages.Heartbeat(worker_id="d0", epoch=7, progress_age_s=0.0, load=LOAD, handoffs=[("r", 3)]),
    messages.PeerHello(sender=PEER, compatibility={"codec": "raw"}, transport_metadata=b"\x00\x01", is_reply=True),
    messages.PeerRefused(sender=PEER, reason="codec"),
    messages.LeaseGrant(sender=PEER, request_id="r", generation=1, first_block=2, block_ids=[3, 4], ttl_s=1.5),
    messages.LeaseRequest(sender=PEER, request_id="r"),
    messages.LeaseQueued(sender=PEER, request_ids=["r"]),
    messages.LeaseRefused(sender=PEER, request_id="r", reason="full"),
    messages.LeaseRevoked(sender=PEER, request_id="r", generation=1),
    messages.LeaseClosed(sender=PEER, request_id="r", generation=1),
    messages.WriteBegun(sender=PEER),
    messages.ReadRequest(sender=PEER, read_id=1, digests=[b"d" * 16], ttl_s=5.0),
    messages.ReadGrant(sender=PEER, read_id=1, block_ids=[3, 4], checksums=[b"c", b""]),
    messages.ReadDone(sender=PEER, read_id=1),
    messages.Pin(pin_id="p", digests=[b"d" * 16], ttl_s=5.0, prefetch=messages.Prefetch.POOL),
    messages.Unpin(pin_id="p"),
    messages.PinQuery(query_id="q", pin_ids=["p"]),
    messages.PinReport(query_id="q", held={"p": {"pool": 3}}),
    messages.ChunkArrived(request_id="r", generation=1, first_block=0, num_blocks=1, checksums=[b"c"]),
    messages.HandoffDone(request_id="r", generation=1, first_token_ids=(9, None)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: messages.Message) -> None:
    encoded = messages.encode_message(message)
    assert messages.decode_message(encoded) == message
    assert messages.decode_message(memoryview(encoded)) == message


@pytest.mark.parametrize("token_id", [-1, 1 << 31])
def test_a_first_token_that_a_sequence_cannot_keep_is_refused(token_id: int) -> None:
    done = messages.HandoffDone(request_id="r", generation=1, first_token_ids=(9, token_id))
    with pytest.raises(msgspec.ValidationError, match="first_token_ids"):
        messages.decode_message(messages.encode_message(done))


def test_every_message_type_has_an_example() -> None:
    assert {type(message) for message in EXAMPLES} == set(typing.get_args(messages.Message))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Unknown"}),
        msgspec.msgpack.encode({"request_id": "r"}),
        msgspec.msgpack.encode({"type": "Cancel"}),
        msgspec.msgpack.encode({"type": "Cancel", "request_id": 5}),
        messages.encode_message(EXAMPLES[2])[:-1],
        messages.encode_message(EXAMPLES[0]).replace(b"router", b"\xff\xfe\xfd\xfc\xfb\xfa"),  # no UTF-8
        b"\x91" * 100_000,  # nested too deep
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode_message(data)


@pytest.mark.parametrize("field", ["stored", "removed", "digests"])
@pytest.mark.parametrize(
    ("run", "flaw"),
    [
        (b"a" * 15, "15 bytes are not digests of 16 bytes"),
        (b"a" * 33, "33 bytes are not digests of 16 bytes"),
        (b"a" * 16 * (messages.MAX_RUN_DIGESTS + 1), "length <= 65536"),
        ([b"a" * 16], "Expected `bytes`, got `array`"),  # as before version 16
        ("a" * 16, "Expected `bytes`, got `str`"),
    ],
    ids=["truncated", "too long by a byte", "huge", "list", "text"],
)
def test_a_run_of_digests_that_is_cut_or_too_long_is_refused_by_name(field: str, run: object, flaw: str) -> None:
    kind = "BlockSnapshot" if field == "digests" else "BlockEvents"
    fields = {"digests": b""} if field == "digests" else {"stored": b"", "removed": b""}
    about = {"type": kind, "worker_id": "d0", "epoch": 7, "sequence": 1}
    assert messages.decode_worker_message(msgspec.msgpack.encode(about | fields))
    with pytest.raises(msgspec.ValidationError) as error:
        messages.decode_worker_message(msgspec.msgpack.encode(about | fields | {field: run}))
    assert flaw in str(error.value)


def test_a_message_is_full_with_as_many_digests_as_a_run_may_have() -> None:
    full = b"a" * 16 * messages.MAX_RUN_DIGESTS
    events = messages.BlockEvents(worker_id="d0", epoch=7, sequence=1, stored=full, removed=full)
    assert messages.decode_worker_message(messages.encode_message(events)) == events

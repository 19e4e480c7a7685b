"""Messages between workers: links, leases and reads, and the notes that the KV transport delivers with its writes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.messages.fields import (
    WIRE_VERSION,
    BlockIds,
    Checksums,
    Digest,
    Digests,
    FirstTokens,
    Lifetime,
    Measure,
    Name,
    Names,
    Number,
    Text,
)
from tandem.protocol.messages.worker import PeerAddress

# `LeaseClosed.reason` of a request that ended with its first token: there is nothing to hand over, and nothing failed.
FINISHED_EARLY = "finished with the first token"


class PeerHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Opens a link: who the sender is, what must agree, and (only once it agrees) how its pool is reached."""

    sender: PeerAddress
    compatibility: Annotated[dict[Name, Name], Meta(max_length=64)]
    wire_version: Number = WIRE_VERSION
    transport_metadata: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    is_reply: bool = False
    wire_codec: Name = ""  # in which the sender takes packed blocks; "" = in none
    unpack_block_s: Measure = 0.0  # that it needs for each


class PeerRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The link is refused. `reason` names each field that differs, without its value."""

    sender: PeerAddress
    reason: Text


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill -> decode: lend blocks for this prompt's KV. May arrive before the `Decode` of the same request."""

    sender: PeerAddress
    request_id: Name


class LeaseQueued(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Decode -> prefill: these lease requests wait for room. Sent repeatedly while they do."""

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
    """Decode -> prefill: this request gets no lease; drop it."""

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

    `first_token_ids` are those of `HandoffDone` if everything was written and that was sent: the receiver may have
    missed it.
    """

    sender: PeerAddress
    request_id: Name
    generation: Number
    reason: Text = ""
    first_token_ids: FirstTokens = ()


class WriteBegun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prefill -> decode: poll your transport often now. A write under a lease of yours has begun and may need that.

    It changes nothing else, and is sent only where a transport cannot wake its owner.
    """

    sender: PeerAddress


class ReadRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reader -> holder: keep the blocks of this chain that you have for `ttl_s`, and say where they are."""

    sender: PeerAddress
    read_id: Number
    digests: Digests
    parent: Digest | None = None  # digest of the block before them
    ttl_s: Lifetime


class ReadGrant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Holder -> reader: the leading blocks asked for are in `block_ids`, and stay unchanged for `ttl_s` from now on.

    `checksums` are as in `ChunkArrived`.
    """

    sender: PeerAddress
    read_id: Number
    block_ids: BlockIds
    checksums: Checksums = []


class ReadDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reader -> holder: nothing of this read is in flight.

    `copied` is the last digest of a chain that the reader has now, so that the holder may drop its own copy; or empty.
    """

    sender: PeerAddress
    read_id: Number
    copied: bytes = b""


class ChunkArrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Delivered with a write: these blocks (indices within the prompt) are in place now.

    `checksums` has one digest per block, of its bytes; it is empty when checking is off. With a `codec`, the first of
    the blocks hold all of them, packed as `tandem.kv_transfer.wire_codec` says.
    """

    request_id: Name
    generation: Number
    first_block: Number
    num_blocks: Number
    checksums: Checksums = []
    codec: Name = ""


class HandoffDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Delivered after the last write: prefill is complete. The router already has these first tokens."""

    request_id: Name
    generation: Number
    first_token_ids: FirstTokens

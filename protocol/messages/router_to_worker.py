"""Messages from a router to a worker."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.protocol.digest import LONG_PROMPT_TOKENS, TOKEN_BYTES, token_bytes
from tandem.protocol.messages.fields import WIRE_VERSION, Digests, Name, Names, Number, Packed, TokenIds
from tandem.protocol.messages.worker import KvHolder, PeerAddress
from tandem.protocol.sampling import SamplingParams


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message of a router. The worker answers `Welcome` and sends its events to this router from then on."""

    router_id: Name
    wire_version: Number = WIRE_VERSION


class Introduce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These workers belong to the cluster: accept their connections and the messages in their own name."""

    peers: list[PeerAddress]


class WorkerPriority(msgspec.Struct, frozen=True, omit_defaults=True):
    """What decides at one worker whose turn it is: of prompts to compute, and of tenants to take memory and seats."""

    # Prompts of a smaller order are computed first, and overtake a running one between two steps; first come, first
    # served among equals. Grammars are compiled in the same order.
    order: Annotated[float, Meta(ge=-1e300)] = 0.0
    # It joins no step with more prompt tokens than this, so that it can soon be overtaken; 0 = any step.
    max_step_tokens: Number = 0
    tenant: str = ""
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # of the tenant: its share of the room, as of worker seconds


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Another answer to the prompt of a request. It differs in its name and its draws."""

    request_id: Name
    seed: Number


class _ToCompute(msgspec.Struct, frozen=True, kw_only=True):
    """A request, and how to compute it.

    `output_ids` is the beginning of the answer if another worker has already given it: the answer continues as it would
    have there. Offsets, penalties, `min_tokens`, `max_tokens`, draws and the grammar count it as output.

    `forks` are further answers to the same prompt, which is computed once. Each has its own name in what the worker
    says about it, and is cancelled by that name.

    A prompt is either `token_ids` or `packed_ids`: see `prompt_fields`.
    """

    request_id: Name
    token_ids: TokenIds = []
    packed_ids: Packed = b""
    sampling: SamplingParams
    output_ids: TokenIds = []
    cache_salt: str = ""
    priority: WorkerPriority = WorkerPriority()
    is_traced: bool = False  # the first tokens tell what was done for them, and when
    forks: Annotated[list[Fork], Meta(max_length=1 << 16)] = []

    def __post_init__(self) -> None:
        if self.packed_ids and self.token_ids:
            raise ValueError("a prompt is in token_ids or in packed_ids, not in both")
        if len(self.packed_ids) % TOKEN_BYTES:
            raise ValueError(f"packed_ids has {len(self.packed_ids)} bytes, which are not ids of {TOKEN_BYTES} bytes")

    @property
    def request_ids(self) -> list[str]:
        """The names of all its answers."""
        return [self.request_id, *(fork.request_id for fork in self.forks)]


def prompt_fields(token_ids: list[int]) -> dict[str, Any]:
    """The field of a request for this prompt.

    A long one is packed: as a list, a million ids take a worker 40 ms to read, which it cannot do in pieces.
    """
    if len(token_ids) <= LONG_PROMPT_TOKENS:
        return {"token_ids": token_ids}
    return {"packed_ids": token_bytes(token_ids)}


class Generate(_ToCompute, frozen=True, kw_only=True, tag=True):
    """Do the whole request on this worker: prefill and decode."""

    kv_holder: KvHolder | None = None  # another worker that has more of the prompt, if there is one


class Prefill(_ToCompute, frozen=True, kw_only=True, tag=True):
    """Compute prompt and known output, send the next token to the router and the KV to `decode_worker`."""

    decode_worker: PeerAddress
    kv_holder: KvHolder | None = None


class Decode(_ToCompute, frozen=True, kw_only=True, tag=True):
    """Reserve room for the KV of prompt and known output, let `prefill_worker` fill it, then decode."""

    prefill_worker: PeerAddress


class CopyKv(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read these blocks, a chain from its beginning, from `source` into the prefix cache, as far as there is room.

    Nothing is computed. Answered by a delta that has no tokens and finishes, whatever could be read.
    """

    request_id: Name
    digests: Digests
    source: PeerAddress


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop working on the request and free what it holds. Unknown ids are ignored."""

    request_id: Name
    is_confirmed: bool = False  # answered by `RequestFailed` with the code `CANCELLED`, after the last tokens


class TurnEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How an answer ended, which says how soon its conversation comes back: of requests with tools or a hint."""

    digests: Digests  # from the prompt's last full block to the answer's; those that are not in a tier are ignored
    has_calls: bool
    is_demoted: bool = False  # its client is done with it: the tiers evict it first


class SnapshotRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for all digests in these places of a worker, after a gap in its events."""

    places: Names


class Prefetch(enum.StrEnum):
    """How far up a worker brings the blocks of a pin before a request asks for them."""

    NONE = "none"
    HOST = "host"  # into host memory, from disk or object store
    POOL = "pool"  # into host memory, and once into free blocks of the pool


class Pin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Protect the leading blocks of this chain from eviction for `ttl_s`, including blocks that are cached later.

    Sent again with the same id, it replaces the chain and the time. A worker's own bound limits how much it keeps.
    """

    pin_id: Name
    digests: Digests
    ttl_s: Annotated[float, Meta(ge=-1e9, lt=1e9)]
    prefetch: Prefetch = Prefetch.NONE


class Unpin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a pin before its time. Unknown ids are ignored."""

    pin_id: Name


class PinQuery(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask how many blocks of some pins are here. Answered by `PinReport`."""

    query_id: Name
    pin_ids: Names

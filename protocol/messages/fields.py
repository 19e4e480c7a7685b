"""Field types of messages, with bounds: a length or a number that would do harm does not decode."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tandem.protocol.digest import DIGEST_BYTES

WIRE_VERSION = 20  # changes with the meaning of any field and of digests; peers with another version are refused

_MAX_INT = 2**63 - 1
_MAX_ITEMS = 1 << 24  # in a list: tokens of a prompt, blocks of a handoff
_MAX_DIGESTS = 1 << 26  # blocks in a tier
MAX_RUN_DIGESTS = 4096  # in a message about a cache: its reader takes one in a few ms, and has other work between two

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
# Digests in a row, in the order of a chain where they are of one. As a list they would cost 0.1 us each to read.
DigestRun = Annotated[bytes, Meta(max_length=MAX_RUN_DIGESTS * DIGEST_BYTES)]
BlockIds = Annotated[list[BlockId], Meta(max_length=_MAX_ITEMS)]
Checksums = Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=_MAX_ITEMS)]
Packed = Annotated[bytes, Meta(max_length=4 * _MAX_ITEMS)]  # numbers of 4 bytes, little-endian
# The first token of each answer to a prompt, in the order of their request; None for one that ended with it or failed.
FirstTokens = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 31)] | None, ...], Meta(max_length=1 << 17)]
TokenIds = Annotated[list[int], Meta(max_length=_MAX_ITEMS)]  # NOTE: the engine checks that the ids exist

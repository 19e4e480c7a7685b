"""Pinned prefixes, the quotas of their tenants, and the conversations that pins follow. No I/O and no clock."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem.protocol.digest import DIGEST_BYTES, CacheScope
from tandem.protocol.errors import PinNotFound, PinQuotaExceeded, RequestError
from tandem.protocol.messages import Prefetch
from tandem.scheduling.admission.tenants import PinQuotas

MAX_CONVERSATION_BYTES = 32 << 20  # for all conversations: 2 M blocks, less the fixed cost of short ones
CONVERSATION_BYTES = 512  # about what one conversation takes besides its digests


class PinOwner(NamedTuple):
    """The tenant of a pin or a conversation, and the scope of its cached blocks."""

    tenant: str
    scope: CacheScope


class _OfTenant:
    """The conversations of one tenant, the least recently used first, and their size."""

    def __init__(self) -> None:
        self.keys: OrderedDict[tuple[PinOwner, str], None] = OrderedDict()
        self.num_bytes = 0


class Conversations:
    """The latest chain of digests of each conversation. The least recently used are forgotten first.

    Clients name them as they like, so a tenant that has more than its share loses its own.
    """

    def __init__(self, max_bytes: int = MAX_CONVERSATION_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._chains: OrderedDict[tuple[PinOwner, str], bytes] = OrderedDict()  # joined: a third of the memory
        self._tenants: defaultdict[str, _OfTenant] = defaultdict(_OfTenant)

    def __len__(self) -> int:
        return len(self._chains)

    def note(self, owner: PinOwner, conversation_id: str, digests: Sequence[bytes]) -> None:
        """Record the blocks that a conversation consists of now."""
        key = (owner, conversation_id)
        if key in self._chains:
            self._forget(key)
        self._chains[key] = joined = b"".join(digests)
        mine = self._tenants[owner.tenant]
        mine.keys[key] = None
        mine.num_bytes += _size(key, joined)
        self._num_bytes += _size(key, joined)
        while self._num_bytes > self._max_bytes:
            has_too_much = mine.keys and mine.num_bytes * len(self._tenants) > self._max_bytes
            self._forget(next(iter(mine.keys if has_too_much else self._chains)))

    def _forget(self, key: tuple[PinOwner, str]) -> None:
        num_bytes = _size(key, self._chains.pop(key))
        self._num_bytes -= num_bytes
        tenant = self._tenants[key[0].tenant]
        del tenant.keys[key]
        tenant.num_bytes -= num_bytes
        if not tenant.keys:
            del self._tenants[key[0].tenant]

    def digests(self, owner: PinOwner, conversation_id: str) -> list[bytes]:
        """The chain of a conversation's latest turn; empty if the conversation is unknown."""
        joined = self._chains.get((owner, conversation_id), b"")
        return [joined[start : start + DIGEST_BYTES] for start in range(0, len(joined), DIGEST_BYTES)]


@dataclass(eq=False, slots=True)
class PinnedChain:
    """One pin. Only `PinLedger` changes it."""

    pin_id: str
    owner: PinOwner
    conversation_id: str  # the pin follows this conversation; "" = it stays as it is
    expires_at: float
    prefetch: Prefetch
    digests: tuple[bytes, ...] = ()
    key_id: str = ""  # the API key that made it; "" = none
    is_hint: bool = False  # made by a request's cache hint

    def goes_on_as(self, pin: PinnedChain, digests: Sequence[bytes]) -> bool:
        """Whether a new pin of these blocks, by a hint, extends this one: the same conversation or a longer chain."""
        same = (pin.owner, pin.key_id, pin.conversation_id)
        if not self.is_hint or (self.owner, self.key_id, self.conversation_id) != same:
            return False
        num = len(self.digests)  # a digest names its whole chain
        return bool(pin.conversation_id) or (0 < num <= len(digests) and digests[num - 1] == self.digests[-1])


class PinLedger:
    """All live pins, and how much of the quotas their tenants use. No I/O and no clock: the time is passed in.

    A block counts once for each tenant whose pins cover it. Tenants have equal blocks only if they share a cache.
    """

    def __init__(self, quotas: PinQuotas) -> None:
        self.num_refused: Counter[str] = Counter()  # by the exceeded quota
        self._quotas = quotas
        self._pins: dict[str, PinnedChain] = {}  # oldest first
        self._uses: dict[str, Counter[bytes]] = {}  # by tenant: by block, the pins that cover it

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def num_blocks(self) -> int:
        """Blocks that pins cover, whether they are cached or not."""
        return sum(len(uses) for uses in self._uses.values())

    def live(self, now: float) -> list[PinnedChain]:
        """The pins that have not expired, oldest first; forgets the others."""
        for pin in [pin for pin in self._pins.values() if pin.expires_at <= now]:
            self.remove(pin.pin_id)
        return list(self._pins.values())

    def get(self, pin_id: str, tenant: str | None, now: float) -> PinnedChain:
        """A live pin of a tenant; None = of any tenant. Raises `PinNotFound`."""
        self.live(now)
        pin = self._pins.get(pin_id)
        if pin is None or tenant not in (None, pin.owner.tenant):
            raise PinNotFound(f"There is no pin '{pin_id[:100]}'; it may have expired.", param="id")
        return pin

    def add(
        self,
        pin: PinnedChain,
        digests: Sequence[bytes],
        max_blocks: int,
        now: float,
        *,
        max_of_key: int | None = None,
    ) -> None:
        """Add a pin that covers these blocks; all pins may cover `max_blocks`.

        `max_of_key`: live pins that its API key may have; None = no limit. Raises `PinQuotaExceeded`, and
        `RequestError` if the key may pin nothing.
        """
        pins = self.live(now)
        self._check_key(pin, pins, max_of_key, now)
        tenant = pin.owner.tenant
        num_of_tenant = sum(other.owner.tenant == tenant for other in pins)
        uses = self._uses.get(tenant, Counter())
        num_new = len(set(digests) - uses.keys())
        max_of_tenant = int(max_blocks * self._quotas.pin_tenant_share)
        for quota, value, limit, what in (
            ("max_pins", len(pins) + 1, self._quotas.max_pins, "pins"),
            ("max_pins_per_tenant", num_of_tenant + 1, self._quotas.max_pins_per_tenant, "pins of this tenant"),
            ("pin_share", self.num_blocks + num_new, max_blocks, "blocks of all pins"),
            ("pin_tenant_share", len(uses) + num_new, max_of_tenant, "blocks of this tenant's pins"),
        ):
            if value > limit:
                self.num_refused[quota] += 1
                raised = "--pin-share" if quota == "pin_share" else f"{quota} in [pins] of the tenants file"
                first_end_s = min((other.expires_at for other in pins), default=now + 1.0) - now
                raise PinQuotaExceeded(
                    f"With this pin there would be {value} {what}, over the limit of {limit} ({quota}); unpin others, "
                    f"wait for one to expire, or raise {raised}.",
                    retry_after_s=first_end_s,
                )
        self._pins[pin.pin_id] = pin
        self._cover(pin, digests)

    def retain(
        self, pin: PinnedChain, digests: Sequence[bytes], max_blocks: int, now: float, *, max_of_key: int | None = None
    ) -> PinnedChain:
        """Add the pin of a hint, or extend the one that it goes on; it covers as many leading blocks as quotas allow.

        Raises as `add`, also if there is no room for any block.
        """
        earlier = next((other for other in self.live(now) if other.goes_on_as(pin, digests)), None)
        if earlier is None:
            allowed = self._allowed(pin.owner.tenant, digests, max_blocks)
            self.add(pin, allowed or digests, max_blocks, now, max_of_key=max_of_key)
            return pin
        earlier.expires_at = max(earlier.expires_at, pin.expires_at)
        earlier.prefetch = pin.prefetch
        self._cover_allowed(earlier, digests, max_blocks)
        return earlier

    def _check_key(self, pin: PinnedChain, pins: Sequence[PinnedChain], limit: int | None, now: float) -> None:
        own = [other.expires_at for other in pins if other.key_id == pin.key_id]
        if limit is None or len(own) < limit:
            return
        self.num_refused["key_pins"] += 1
        if not own:  # waiting cannot help
            raise RequestError(f"The API key {pin.key_id} may pin nothing (pins={limit}).", code="pin_quota_exceeded")
        raise PinQuotaExceeded(
            f"The API key {pin.key_id} has {len(own)} pins, and its limit is pins={limit}; unpin others, or wait for "
            "one to expire.",
            retry_after_s=min(own) - now,
        )

    def remove(self, pin_id: str) -> None:
        """Forget a live pin."""
        pin = self._pins.pop(pin_id)
        self._cover(pin, ())

    def follow(
        self, owner: PinOwner, conversation_id: str, digests: Sequence[bytes], max_blocks: int, now: float
    ) -> list[PinnedChain]:
        """Make the pins of a conversation cover its latest turn, within the quotas; return those that changed."""
        changed = []
        for pin in self.live(now):
            if (pin.owner, pin.conversation_id) != (owner, conversation_id):
                continue
            before = pin.digests
            self._cover_allowed(pin, digests, max_blocks)
            if pin.digests != before:
                changed.append(pin)
        return changed

    def check_integrity(self) -> None:
        """Raise `AssertionError` unless the covered blocks are those of the pins."""
        uses: dict[str, Counter[bytes]] = {}
        for pin in self._pins.values():
            if pin.digests:
                uses.setdefault(pin.owner.tenant, Counter()).update(pin.digests)
        assert uses == self._uses, "covered blocks disagree"

    def _cover_allowed(self, pin: PinnedChain, digests: Sequence[bytes], max_blocks: int) -> None:
        self._cover(pin, ())
        self._cover(pin, self._allowed(pin.owner.tenant, digests, max_blocks))

    def _allowed(self, tenant: str, digests: Sequence[bytes], max_blocks: int) -> tuple[bytes, ...]:
        """The leading blocks that one more pin of a tenant may cover."""
        uses = self._uses.get(tenant, Counter())
        room = min(max_blocks - self.num_blocks, int(max_blocks * self._quotas.pin_tenant_share) - len(uses))
        return _leading(digests, uses, room)

    def _cover(self, pin: PinnedChain, digests: Sequence[bytes]) -> None:
        """Make a pin cover exactly these blocks."""
        uses = self._uses.setdefault(pin.owner.tenant, Counter())
        uses.update(digests)
        uses.subtract(pin.digests)
        for digest in pin.digests:
            if not uses[digest]:
                del uses[digest]
        if not uses:
            del self._uses[pin.owner.tenant]
        pin.digests = tuple(digests)


def _size(key: tuple[PinOwner, str], joined: bytes) -> int:
    owner, conversation_id = key
    return CONVERSATION_BYTES + sum(map(len, owner)) + len(conversation_id) + len(joined)


def _leading(digests: Sequence[bytes], uses: Mapping[bytes, int], room: int) -> tuple[bytes, ...]:
    """The most leading blocks of which at most `room` are new."""
    for count, digest in enumerate(digests):
        room -= digest not in uses
        if room < 0:
            return tuple(digests[:count])
    return tuple(digests)

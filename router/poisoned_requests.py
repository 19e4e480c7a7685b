"""Requests that killed workers. Clients resend failed requests by themselves, which would kill the next workers too."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tandem.protocol.errors import PoisonedRequest

__all__ = ["MAX_DEATHS", "PoisonedRequests", "fingerprint"]

MAX_DEATHS = 3  # workers that may die while they have the same request
REFUSED_S = 600.0
MAX_REMEMBERED = 256


class PoisonedRequests:
    """Refuses requests equal to those that killed several workers, for `REFUSED_S`.

    Requests with the same fingerprint do the same to a worker. Fingerprints are computed only if needed.
    """

    def __init__(self, workers: str = "workers") -> None:
        """`workers`: what errors call them."""
        self._workers = workers
        self.num_added = 0
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # by fingerprint, oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, fingerprint: bytes, lost_workers: Sequence[str], now: float) -> PoisonedRequest:
        """Refuse such requests from now on. Returns the error for this one."""
        self.num_added += 1
        self._until_s[fingerprint] = now + REFUSED_S
        self._until_s.move_to_end(fingerprint)
        if len(self._until_s) > MAX_REMEMBERED:
            self._until_s.popitem(last=False)
        names = ", ".join(lost_workers)
        return PoisonedRequest(
            f"{len(lost_workers)} {self._workers} ended while they had this request ({names}), so it is given up. "
            f"Requests like it are refused for {REFUSED_S:.0f} s. The logs of the {self._workers} say why they ended."
        )

    def check(self, fingerprint: Callable[[], bytes], now: float) -> None:
        """Raise `PoisonedRequest` for a request like one that was given up a short time ago."""
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)
        if self._until_s and (until_s := self._until_s.get(fingerprint())) is not None:
            raise PoisonedRequest(
                f"Several {self._workers} ended while they had a request like this one. It is refused for "
                f"{until_s - now:.0f} s more. The logs of the {self._workers} say why they ended."
            )


def fingerprint(prompt: bytes, *others: Any) -> bytes:
    """The fingerprint of a request: its prompt, and whatever else its computation depends on."""
    return hashlib.blake2b(prompt + msgspec.msgpack.encode(others), digest_size=16).digest()

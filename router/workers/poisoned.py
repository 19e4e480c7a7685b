"""Requests that workers died of: clients send a failed request again by themselves, and would end the next workers."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.protocol.errors import PoisonedRequest
from tandem.router.backend import GenerateRequest

__all__ = ["MAX_DEATHS", "PoisonedRequests"]

MAX_DEATHS = 3  # of workers that had the same request
REFUSED_S = 600.0
MAX_REMEMBERED = 256


class PoisonedRequests:
    """Refuses requests equal to those that several workers died of, for `REFUSED_S`."""

    def __init__(self) -> None:
        self.num_added = 0
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # by fingerprint, oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, request: GenerateRequest, lost_workers: Sequence[str], now: float) -> PoisonedRequest:
        """Refuse such requests from now on. Returns the error for this one."""
        self.num_added += 1
        fingerprint = _fingerprint(request)
        self._until_s[fingerprint] = now + REFUSED_S
        self._until_s.move_to_end(fingerprint)
        if len(self._until_s) > MAX_REMEMBERED:
            self._until_s.popitem(last=False)
        names = ", ".join(lost_workers)
        return PoisonedRequest(
            f"{len(lost_workers)} workers ended while they had this request ({names}), so it is given up. Requests "
            f"like it are refused for {REFUSED_S:.0f} s. The workers' logs say why they ended."
        )

    def check(self, request: GenerateRequest, now: float) -> None:
        """Raise `PoisonedRequest` for a request like one that was given up a short time ago."""
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)
        if self._until_s and (until_s := self._until_s.get(_fingerprint(request))) is not None:
            raise PoisonedRequest(
                f"Several workers ended while they had a request like this one. It is refused for "
                f"{until_s - now:.0f} s more. The workers' logs say why they ended."
            )


def _fingerprint(request: GenerateRequest) -> bytes:
    """What requests have in common that do the same to a worker. The seed is left out: it is drawn anew each time."""
    sampling = msgspec.structs.replace(request.sampling, seed=0)
    hashed = hashlib.blake2b(np.array(request.token_ids, dtype=np.int64).tobytes(), digest_size=16)
    hashed.update(msgspec.msgpack.encode([sampling, request.adapter]))
    return hashed.digest()

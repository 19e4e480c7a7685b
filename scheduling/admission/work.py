"""Amounts of predicted work."""

from __future__ import annotations

import msgspec


class Work(msgspec.Struct, frozen=True):
    """What a number of requests is predicted to take. A struct, because several are made for each request."""

    num_requests: int = 0
    worker_s: float = 0.0  # worker seconds for prompts and answers: what tenants share
    pair_s: float = 0.0  # the part until the first token of requests whose prompt a prefill worker computes
    alone_s: float = 0.0  # the same, of requests whose prompt the decoding worker computes
    new_tokens: int = 0  # prompt tokens to compute
    kv_tokens: int = 0  # sum of the lengths that the sequences are expected to reach

    @property
    def prefill_s(self) -> float:
        """Worker seconds until the first token, on any workers."""
        return self.pair_s + self.alone_s

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_requests + other.num_requests,
            self.worker_s + other.worker_s,
            self.pair_s + other.pair_s,
            self.alone_s + other.alone_s,
            self.new_tokens + other.new_tokens,
            self.kv_tokens + other.kv_tokens,
        )

    def __sub__(self, other: Work) -> Work:
        return self + other * -1

    def __mul__(self, factor: float) -> Work:
        return Work(
            round(self.num_requests * factor),
            self.worker_s * factor,
            self.pair_s * factor,
            self.alone_s * factor,
            round(self.new_tokens * factor),
            round(self.kv_tokens * factor),
        )


NO_WORK = Work()

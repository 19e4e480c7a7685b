"""Further answers to a prompt wait here for the first one, to begin together with it on its workers."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class ForkLine(Generic[T]):
    """The forks of each leader, in order, until it takes them or lets them go.

    A leader asks once, so its forks come before it.
    """

    def __init__(self) -> None:
        self._forks: dict[str, dict[T, asyncio.Future[bool]]] = {}  # by leader

    async def wait(self, leader: str, fork: T, timeout_s: float) -> bool:
        """Whether the leader took this fork. If not, it goes on by itself. Raises `TimeoutError`."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._forks.setdefault(leader, {})[fork] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        finally:
            self._leave(leader, fork)

    def waiting(self, leader: str) -> list[T]:
        """The forks that wait for this leader."""
        return list(self._forks.get(leader, ()))

    def take(self, leader: str, fork: T) -> None:
        """The fork begins together with its leader."""
        self._end(leader, fork, is_taken=True)

    def let_go(self, leader: str) -> None:
        """All that still wait for this leader go on by themselves."""
        for fork in self.waiting(leader):
            self._end(leader, fork, is_taken=False)

    def _end(self, leader: str, fork: T, *, is_taken: bool) -> None:
        future = self._forks[leader][fork]
        self._leave(leader, fork)
        if not future.done():  # otherwise its wait was cancelled just now
            future.set_result(is_taken)

    def _leave(self, leader: str, fork: T) -> None:
        forks = self._forks.get(leader, {})
        forks.pop(fork, None)
        if not forks:
            self._forks.pop(leader, None)

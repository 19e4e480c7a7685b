"""Tenants take turns at threads, in whatever order they came, and however much one of them asks for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from tandem.text.fair_threads import FairThreads


class Held:
    """One thread, which is busy until `go_on`; what it does afterwards is in `order`."""

    def __init__(self) -> None:
        self.threads = FairThreads(1, "test")
        self.order: list[str] = []
        self._may_go_on = threading.Event()
        self._asked = [asyncio.ensure_future(self.threads.run(self._may_go_on.wait, tenant="first", amount=1.0))]

    def ask(self, name: str, amount: float = 1.0) -> asyncio.Future[None]:
        """`name` begins with its tenant."""
        call: Callable[[], None] = lambda: self.order.append(name)  # noqa: E731
        self._asked.append(asyncio.ensure_future(self.threads.run(call, tenant=name[0], amount=amount)))  # type: ignore[arg-type]
        return self._asked[-1]  # type: ignore[return-value]

    async def go_on(self) -> list[str]:
        await asyncio.sleep(0)  # all have asked
        self._may_go_on.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*self._asked, return_exceptions=True)
        return self.order

    def close(self) -> None:
        self._may_go_on.set()
        self.threads.close()


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    made = Held()
    yield made
    made.close()


async def test_a_tenant_waits_for_at_most_one_piece_of_another_one(held: Held) -> None:
    for number in range(5):
        held.ask(f"a{number}")
    await asyncio.sleep(0)
    for number in range(3):
        held.ask(f"b{number}")
    assert await held.go_on() == ["b0", "a0", "b1", "a1", "b2", "a2", "a3", "a4"]


async def test_a_tenant_with_large_pieces_gets_fewer_turns(held: Held) -> None:
    for number in range(3):
        held.ask(f"a{number}", 3.0)
    for number in range(6):
        held.ask(f"b{number}", 1.0)
    assert await held.go_on() == ["a0", "b0", "b1", "b2", "a1", "b3", "b4", "b5", "a2"]


async def test_what_leaves_while_it_waits_is_not_done(held: Held) -> None:
    left, kept = held.ask("a-left"), held.ask("a-kept")
    await asyncio.sleep(0)
    left.cancel()
    assert await held.go_on() == ["a-kept"]
    assert left.cancelled()
    assert not kept.cancelled()


async def test_an_error_is_its_askers_and_the_thread_goes_on(held: Held) -> None:
    failing = asyncio.ensure_future(held.threads.run(lambda: 1 // 0, tenant="a", amount=1.0))
    held.ask("b")
    assert await held.go_on() == ["b"]
    with pytest.raises(ZeroDivisionError):
        await failing

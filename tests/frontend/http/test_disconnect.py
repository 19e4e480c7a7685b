"""`cancel_on_disconnect`: only a client that leaves ends the block, and nothing goes on behind it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.errors import ClientDisconnected


class _Client:
    """Messages as a server hands them to its app. Each call waits for the next one."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.is_called = asyncio.Event()
        self.num_calls = self.num_ended = 0

    async def receive(self) -> Message:
        self.num_calls += 1
        self.is_called.set()
        try:
            await asyncio.sleep(0)
            return await self.messages.get()
        finally:
            self.num_ended += 1


async def _wait_in_a_block(client: _Client) -> None:
    async with cancel_on_disconnect(client.receive):
        await asyncio.Event().wait()


async def test_a_client_that_leaves_ends_the_block() -> None:
    client = _Client()
    client.messages.put_nowait({"type": "http.request"})  # says nothing about leaving
    task = asyncio.create_task(_wait_in_a_block(client))
    await client.is_called.wait()
    client.messages.put_nowait({"type": "http.disconnect"})
    with pytest.raises(ClientDisconnected):
        await task
    assert client.num_calls == client.num_ended == 2
    assert not task.cancelling()


async def test_nothing_listens_behind_the_block() -> None:
    client = _Client()
    async with cancel_on_disconnect(client.receive):
        await client.is_called.wait()
        client.messages.put_nowait({"type": "http.disconnect"})  # noticed too late: the block ends first
    for _ in range(5):
        await asyncio.sleep(0)
    assert client.num_calls == client.num_ended == 1


async def test_a_block_that_never_waits_never_listens() -> None:
    client = _Client()
    async with cancel_on_disconnect(client.receive):
        pass
    await asyncio.sleep(0)
    assert client.num_calls == 0


async def test_another_cancellation_stays_one() -> None:
    client = _Client()
    task = asyncio.create_task(_wait_in_a_block(client))
    await client.is_called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.num_calls == client.num_ended

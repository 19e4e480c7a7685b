from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq
from zmq.constants import SocketType

from tandem.runtime import message_socket
from tandem.runtime.message_socket import MessageSocket
from tests.support.waiting import eventually

ENDPOINT = "inproc://here"
Messages = list[list[bytes]]


def connected() -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A router and a dealer, and their context."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router, dealer = context.socket(SocketType.ROUTER), context.socket(SocketType.DEALER)
    for socket in (router, dealer):
        socket.sndhwm = socket.rcvhwm = 0
    dealer.identity = b"dealer"
    router.bind(ENDPOINT)
    dealer.connect(ENDPOINT)
    return context, router, dealer


@asynccontextmanager
async def pair(
    on_message: Callable[[MessageSocket, list[bytes]], object] = lambda socket, frames: None,
    sockets: tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes], zmq.Socket[bytes]] | None = None,
) -> AsyncIterator[tuple[MessageSocket, MessageSocket, Messages, Messages]]:
    """Two sockets, and the messages that each received. `on_message` gets those of the first one too."""
    context, router, dealer = sockets or connected()
    heard: tuple[Messages, Messages] = ([], [])

    def at_router(frames: list[bytes]) -> None:
        heard[0].append(frames)
        on_message(ends[0], frames)

    ends = [MessageSocket(router, at_router), MessageSocket(dealer, heard[1].append)]
    try:
        async with asyncio.timeout(30):
            yield ends[0], ends[1], *heard
    finally:
        for end in ends:
            end.close()
            end.close()  # again
            end.send(b"too late")
        context.term()


async def test_messages_arrive_whole_and_in_order() -> None:
    async with pair() as (router, dealer, to_router, to_dealer):
        sent = [b"%d" % number for number in range(3 * message_socket.MAX_RECEIVED)]
        for data in sent:
            dealer.send(data)
        await eventually(lambda: len(to_router) == len(sent))
        assert to_router == [[b"dealer", data] for data in sent]
        router.send(b"dealer", b"a", b"b")
        await eventually(lambda: len(to_dealer) == 1)
        assert to_dealer == [[b"a", b"b"]]


async def test_between_messages_that_take_long_other_callbacks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_socket, "MAX_READ_S", 0.0)  # each takes longer than that
    turns, read_in = 0, list[int]()

    def turn() -> None:
        nonlocal turns
        turns += 1
        if len(read_in) < 5:
            asyncio.get_running_loop().call_soon(turn)

    async with pair(lambda *_: read_in.append(turns)) as (_, dealer, to_router, _):
        turn()
        for number in range(5):
            dealer.send(b"%d" % number)
        await eventually(lambda: len(read_in) == 5)
        assert to_router == [[b"dealer", b"%d" % number] for number in range(5)]
        assert len(set(read_in)) == 5, "several in one callback"


async def test_messages_that_arrive_while_sending_are_not_missed() -> None:
    _, bare_router, bare_dealer = sockets = connected()
    async with pair(sockets=sockets) as (router, dealer, to_router, _):
        dealer.send(b"first")
        await eventually(lambda: len(to_router) == 1)
        await asyncio.sleep(0)
        bare_dealer.send(b"second")
        # As sending does now and then: the signal for new messages is consumed, and the descriptor stays silent.
        assert bare_router.poll(0, zmq.POLLIN)
        router.send(b"dealer", b"mine")
        await eventually(lambda: len(to_router) == 2)


async def test_a_message_whose_handler_raises_is_logged_and_the_rest_is_read(caplog: pytest.LogCaptureFixture) -> None:
    found: list[bytes] = []

    def on_message(_: MessageSocket, frames: list[bytes]) -> None:
        if frames[1] == b"bad":
            raise ValueError("bad")
        found.append(frames[1])

    async with pair(on_message) as (_, dealer, _, _):
        for data in (b"a", b"bad", b"b"):
            dealer.send(data)
        await eventually(lambda: len(found) == 2)
        assert found == [b"a", b"b"]
        assert [record.exc_info is not None for record in caplog.records] == [True]


async def test_a_socket_closed_by_a_message_stops_reading() -> None:
    async with pair(lambda socket, _: socket.close()) as (router, dealer, to_router, _):
        for data in (b"a", b"b"):
            dealer.send(data)
        await eventually(lambda: router.closed)
        for _ in range(5):
            await asyncio.sleep(0)
        assert to_router == [[b"dealer", b"a"]]

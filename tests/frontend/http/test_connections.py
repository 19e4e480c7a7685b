"""Which connections are closed when there are too many."""

from __future__ import annotations

import random

import pytest

from tandem.frontend.http.connections import NUM_RESERVED, Connections, network_of
from tandem.protocol.config import RouterConfig


class Client:
    def __init__(self, shared: Connections, network: str) -> None:
        self.shared = shared
        self.network = network
        self.is_shed = False

    def shed(self) -> None:
        self.is_shed = True
        self.shared.remove(self)

    def check_deadlines(self, now_s: float) -> None:
        pass

    def release_body(self) -> None:
        pass

    def refuse_unfinished_body(self) -> None:
        pass


def connections_of(max_connections: int) -> Connections:
    return Connections(RouterConfig(), max_connections)


def connect(shared: Connections, network: str, count: int = 1, *, key: bool = False) -> list[Client]:
    clients = [Client(shared, network) for _ in range(count)]
    for client in clients:
        assert shared.admit(client)
        if key:
            shared.know(client)
    return clients


def run(client: Client) -> None:
    """Its request is complete, and is answered."""
    client.shared.make_room_for(client)
    client.shared.stop_waiting(client)


def shed(clients: list[Client]) -> list[int]:
    return [i for i, client in enumerate(clients) if client.is_shed]


async def test_of_one_network_those_that_have_waited_longest_are_closed() -> None:
    shared = connections_of(10)
    clients = connect(shared, "a", 20)
    run(clients[3])
    assert shed(clients) == [0, 1, 2, 4, 5, 6, 7, 8, 9, 10]


async def test_a_proxy_that_brings_everybody_keeps_all_that_fit() -> None:
    shared = connections_of(100)
    clients = connect(shared, "proxy", 100)
    for client in clients:
        run(client)
    assert shed(clients) == []


async def test_a_network_with_too_many_makes_room_for_the_others() -> None:
    shared = connections_of(100)
    early = [*connect(shared, "b", 3), *connect(shared, "c", 3)]
    flood = connect(shared, "a", 100)
    (late,) = connect(shared, "d")
    run(late)
    assert len(shed(flood)) == 7, "although the others have waited longer"
    assert shed([*early, late]) == []


async def test_a_few_connections_of_each_network_are_not_too_many() -> None:
    shared = connections_of(20)
    idle = connect(shared, "key", 8, key=True)
    clients = [client for name in "abc" for client in connect(shared, name, 4)]
    run(connect(shared, "d")[0])
    assert shed(idle) == [0], "nobody has too many: the one that has waited longest"
    assert shed(clients) == []


async def test_those_with_a_key_count_for_no_network() -> None:
    shared = connections_of(100)
    with_key = connect(shared, "a", 40, key=True)
    flood = connect(shared, "a", 100)
    run(connect(shared, "b")[0])
    assert (shed(with_key), shed(flood)) == ([], list(range(41)))


async def test_streams_are_never_closed_and_the_reserve_is_for_waiting_clients() -> None:
    shared = connections_of(10)
    streams = connect(shared, "proxy", 10)
    for stream in streams:
        run(stream)
    flood = connect(shared, "a", 10 * NUM_RESERVED)
    (probe,) = connect(shared, "b")
    connect(shared, "a", 10 * NUM_RESERVED)
    assert not shared.make_room_for(probe), "its request is answered if it is an operator's"
    assert (shed([*streams, probe]), len(shed(flood)), len(shared.open)) == ([], len(flood), 11)


async def test_one_that_says_why_it_ends_is_closed_for_a_newcomer() -> None:
    shared = connections_of(10)
    refused = connect(shared, "a", 10 + NUM_RESERVED)
    for client in refused:
        shared.leave(client)
    assert (shed(connect(shared, "a", 3)), shed(refused)) == ([], [0, 1, 2])


async def test_there_is_no_room_if_nobody_can_be_closed() -> None:
    shared = connections_of(10)
    for client in connect(shared, "a", 10 + NUM_RESERVED):
        shared.stop_waiting(client)
    assert not shared.admit(Client(shared, "b"))
    assert len(shared.open) == 10 + NUM_RESERVED


@pytest.mark.parametrize("seed", range(20))
async def test_the_accounts_agree_whatever_happens(seed: int) -> None:
    rng, shared = random.Random(seed), connections_of(50)
    for _ in range(2000):
        client = rng.choice([*shared.open, *shared._leaving, Client(shared, rng.choice("abcdefgh"))])
        if client not in shared.open and client not in shared._leaving:
            shared.admit(client)
        elif client in shared.open:
            change = (shared.wait_for, shared.stop_waiting, shared.know, shared.make_room_for, shared.leave)
            rng.choice([*change, shared.remove])(client)
        else:
            shared.remove(client)
        assert len(shared.open) + len(shared._leaving) <= 50 + NUM_RESERVED
        assert shared._waiting.keys() <= shared.open
        by_network = {(one.network, one) for one in shared._waiting if one.network}
        assert {(name, one) for name, line in shared._by_network.items() for one in line} == by_network
        assert all(shared._by_network.values())
    for client in [*shared.open, *shared._leaving]:
        shared.remove(client)
    assert not any((shared.open, shared._leaving, shared._waiting, shared._by_network))


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::"),
        (("2001:db8:1:2:ffff::1", 5, 0, 0), "2001:db8:1:2::"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::"),
        ("", "a socket without an address"),
        (None, "a socket without an address"),
    ],
)
def test_a_network_is_what_one_customer_has(peer: object, network: str) -> None:
    assert network_of(peer) == network

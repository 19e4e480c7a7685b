"""Who was not introduced to a worker gets nothing from it, and cannot harm it; nor can messages that are broken."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.protocol.messages import (
    Cancel,
    Generate,
    Hello,
    Introduce,
    LeaseGrant,
    PeerAddress,
    PeerHello,
    PeerMessage,
    PeerRefused,
    Role,
    RouterMessage,
    StepOutput,
    Welcome,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.runtime.curve import KeyPair, make_keys
from tandem.worker.loop import Worker
from tests.protocol.test_messages import EXAMPLES
from tests.support.cluster_harness import DEADLINE_S, ROUTER_KEYS, Client, RunningWorker, worker_config
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
MODES = ["null", "wrong-server", "own"]


@dataclass
class World:
    running: RunningWorker
    router: Client
    peer: PeerAddress
    peer_keys: KeyPair

    @property
    def worker(self) -> Worker:
        return self.running.worker

    @property
    def dropped(self) -> dict[str, int]:
        return dict(self.worker.parts.dropped.counts)

    def answer(self, request_id: str) -> list[int]:
        """Tokens of a request that is as it should be."""
        sampling = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        self.router.send(Generate(request_id=request_id, token_ids=[5] * 40, sampling=sampling))
        tokens: list[int] = []
        while len(tokens) < 3:
            for delta in self.router.receive(StepOutput).deltas:
                tokens += delta.token_ids if delta.request_id == request_id else []
        return tokens


@pytest.fixture(params=["tcp", "ipc"])
def world(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[World]:
    """A worker with its router, and a peer that was introduced to it but is not there."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder, contextlib.ExitStack() as stack:
        config = worker_config(tiny_model, "w", Role.COLOCATED)
        if request.param == "ipc":
            config = replace(config, socket_folder=folder)
        running = RunningWorker(Worker(config, hub=InProcessHub()))
        stack.callback(running.stop)
        router = stack.enter_context(contextlib.closing(Client(running.worker)))
        keys = make_keys()
        peer = PeerAddress("peer", 1, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", keys.public)
        router.send(Hello(router_id="r"))
        router.receive(Welcome)
        router.send(Introduce(peers=[peer]))
        yield World(running, router, peer, keys)


def strangers_answers(world: World, mode: str, keys: KeyPair | None = None) -> set[str]:
    """What a process gets that knows where the worker is, and its public key."""
    address = world.worker.address
    given = [] if keys is None else [keys.public, keys.secret.decode()]
    where = [address.endpoint, address.heartbeat_endpoint, address.public_key]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.stranger", *where, mode, *given],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("mode", MODES)
def test_a_strangers_process_gets_nothing(world: World, mode: str) -> None:
    before = world.worker.call(world.worker.status)
    assert strangers_answers(world, mode) == set()
    assert world.worker.call(world.worker.status).request_ids == before.request_ids == frozenset()
    assert len(world.answer("a")) == 3
    world.worker.call(lambda: world.worker.check_integrity(idle=True))


def test_the_strangers_test_finds_a_door_that_is_open(world: World) -> None:
    answers = strangers_answers(world, "given", ROUTER_KEYS)
    assert {"Welcome", "BlockSnapshot", "Heartbeat"} <= answers, answers


def test_a_peer_gets_heartbeats_and_nothing_of_a_routers(world: World) -> None:
    """Its messages are those of a router, or name another sender."""
    assert strangers_answers(world, "given", world.peer_keys) <= {"Heartbeat"}
    assert world.dropped["malformed"] >= 3, "those of a router"
    assert world.dropped["impostor"] == 2, "those of a peer of another name"
    assert len(world.answer("a")) == 3


def test_a_peers_hello_is_refused_without_values(world: World) -> None:
    """The refusal goes to the address the router gave, not to wherever the hello came from."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as listener:
        listener.linger = 0
        listener.curve_server = True
        listener.curve_publickey, listener.curve_secretkey = world.peer_keys.public.encode(), world.peer_keys.secret
        port = listener.bind_to_random_port("tcp://127.0.0.1")
        keys = world.peer_keys
        peer = PeerAddress("real", 1, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}", keys.public)
        world.router.send(Introduce(peers=[peer]))
        with contextlib.closing(Client(world.worker, keys)) as client:
            hello = PeerHello(sender=peer, compatibility={"model_revision": "a guess"})
            deadline = time.monotonic() + DEADLINE_S
            while not listener.poll(100):  # the introduction may be read after it
                assert time.monotonic() < deadline
                client.send(hello)
            data = listener.recv_multipart()[-1]
            refused = msgspec.msgpack.decode(data)
            assert refused["type"] == PeerRefused.__name__
            assert "model_revision" in refused["reason"]
            for value in world.worker.parts.compatibility.values():
                assert len(value) < 4 or value.encode() not in data, f"the refusal tells {value!r}"


def test_the_routers_identity_cannot_be_taken(world: World) -> None:
    """An answer goes to the connection that asked: another one of the same name gets none of it."""
    address, name = world.worker.address, b"router-one"

    def connect(context: zmq.Context, keys: KeyPair) -> Any:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.identity = name
        dealer.curve_publickey, dealer.curve_secretkey = keys.public.encode(), keys.secret
        dealer.curve_serverkey = address.public_key.encode()
        dealer.connect(address.endpoint)
        return dealer

    with zmq.Context() as context, connect(context, ROUTER_KEYS) as router:
        router.send(encode_message(Hello(router_id="one")))
        assert router.poll(DEADLINE_S * 1000)
        router.recv()
        with connect(context, world.peer_keys) as thief:
            thief.send(encode_message(Hello(router_id="one")))
            for number in range(20):
                router.send(encode_message(Hello(router_id=f"{number}")))
                assert router.poll(DEADLINE_S * 1000)
                router.recv()
            assert not thief.poll(200)


def test_a_worker_in_a_folder_opens_no_port(tiny_model: Path) -> None:
    def ports() -> set[Any]:
        return {connection.laddr for connection in psutil.Process().net_connections("inet")}

    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        before = ports()
        config = replace(worker_config(tiny_model, "w", Role.COLOCATED), socket_folder=folder)
        running = RunningWorker(Worker(config, hub=InProcessHub()))
        try:
            assert ports() <= before
            assert len(os.listdir(folder)) == 2
        finally:
            running.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_reach_a_worker_in_a_private_folder(tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        assert os.stat(folder).st_mode & 0o777 == 0o700
        config = replace(worker_config(tiny_model, "w", Role.COLOCATED), socket_folder=folder)
        running = RunningWorker(Worker(config, hub=InProcessHub()))
        try:
            path = running.worker.address.endpoint.removeprefix("ipc://")
            assert _outcome_as(os.geteuid(), path) == "connected"
            assert _outcome_as(NOBODY, path) == "PermissionError"
        finally:
            running.stop()


def _outcome_as(user_id: int, path: str) -> str:
    """What happens when this user connects to the Unix socket. In a child that does nothing but system calls."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = "connected"
        try:
            if user_id:
                os.setgroups([])
                os.setgid(user_id)
                os.setuid(user_id)
            socket.socket(socket.AF_UNIX).connect(path)
        except OSError as exc:
            outcome = type(exc).__name__
        finally:
            os.write(write_end, outcome.encode())
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        return pipe.read().decode()


# Broken messages through a door that is open.

HOSTILE: list[Any] = [
    *(-1, 0, 1, 2, 2**31, 2**63, -(2**63), 2**64 - 1),
    *(math.nan, math.inf, -math.inf, -1.0, 1e308, 0.0),
    *("", "x", "x" * 5000, "\0", "tcp://", "ipc:///nowhere/at/all", "\ud7ff"),
    *(b"", b"x" * 16, b"x" * 17, None, True, [], {}, [[]], ["x"], {"x": 1}),
    *([-1], [2**40], [0] * 3000, list(range(500)), [math.nan], [b"d" * 16] * 300),
]


PLAUSIBLE: list[Any] = [
    *(0, 3, 7, 100, 255, 2**31 - 1, 2**53, 2**63 - 1),
    *(1e-300, 1e-9, 0.5, 1e5, 1e9),
    *("r", "a", "pool", "host", "p", "peer", "w", "\U0001f600" * 200),
    *(b"d" * 16, b"\0" * 16),
    *([], [1], [5] * 40, [0, 1, 2], [255, 256, 257], [2**31 - 1], [b"d" * 16] * 3, [b"c"], ["p", "p"], [["r", 3]]),
]


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a message where something can be put."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _leaves(item, (*path, key))


def _mutated(rng: random.Random, message: Any) -> bytes:
    """A message with one to three things wrong, in its values or in its bytes: often of the type that belongs there."""
    value = msgspec.msgpack.decode(encode_message(message))
    is_plausible = rng.random() < 0.6
    for _ in range(rng.randrange(1, 4)):
        *path, last = rng.choice([path for path in _leaves(value) if path != ("type",)] or [("type",)])
        place = value
        for key in path:
            place = place[key]
        alike = [item for item in (*HOSTILE, *PLAUSIBLE) if type(item) is type(place[last]) and is_plausible]
        place[last] = copy.deepcopy(rng.choice(alike or HOSTILE))
    data = bytearray(msgspec.msgpack.encode(value))
    if is_plausible:
        return bytes(data)
    if rng.random() < 0.4:
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.parametrize("seed", range(2))
def test_broken_messages_end_nothing(world: World, seed: int) -> None:
    """1,500 of them, through the connections of the router and of a peer, of all kinds that there are."""
    rng = random.Random(f"broken {seed}")
    named = [_renamed(message, world.peer) for message in EXAMPLES]
    routers = [message for message in named if isinstance(message, RouterMessage)]
    peers = [message for message in named if isinstance(message, PeerMessage)]
    with contextlib.closing(Client(world.worker, world.peer_keys)) as peer:
        for number in range(1500):
            client, its_own = rng.choice([(world.router, routers), (peer, peers)])
            client.send_bytes(_mutated(rng, rng.choice(its_own if rng.random() < 0.9 else named)))
            if number % 100 == 0:
                world.worker.call(world.worker.status)
        peer.send(LeaseGrant(sender=world.peer, request_id="x", generation=1, first_block=0, block_ids=[0], ttl_s=1.0))
        for request_id in world.worker.call(world.worker.status).request_ids:
            world.router.send(Cancel(request_id=request_id))
        assert len(world.answer("good")) == 3
    assert world.running.thread.is_alive()
    assert world.running.failure is None
    assert world.dropped["malformed"] > 500, world.dropped
    world.worker.call(lambda: world.worker.check_integrity())


def _renamed(message: Any, peer: PeerAddress) -> Any:
    """The same from a sender whose words count."""
    return msgspec.structs.replace(message, sender=peer) if "sender" in message.__struct_fields__ else message


def test_another_router_takes_over_and_the_first_one_is_a_stranger(world: World) -> None:
    """What the first one asked for ends: nobody waits for it."""
    sampling = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
    world.router.send(Generate(request_id="long", token_ids=[5] * 40, sampling=sampling))
    world.router.receive(StepOutput)
    keys = make_keys()
    world.worker.call(lambda: world.worker.obey(keys.public))
    world.worker.call(lambda: world.worker.check_integrity(idle=True))
    world.router.send(Generate(request_id="late", token_ids=[5] * 40, sampling=sampling))
    until(lambda: world.dropped.get("stranger", 0) > 0)
    with contextlib.closing(Client(world.worker, keys=keys)) as successor:
        successor.send(Hello(router_id="successor"))
        successor.receive(Welcome)
        world.router = successor
        assert len(world.answer("a")) == 3
    world.worker.call(lambda: world.worker.check_integrity(idle=True))
    assert strangers_answers(world, "given", ROUTER_KEYS) == set()

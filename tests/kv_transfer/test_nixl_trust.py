"""The trust boundary of NIXL's transport: where it listens, which senders and memory descriptions it accepts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import zmq

from tandem.kv_transfer.transport.base import Transport
from tandem.kv_transfer.transport.factory import create_transport
from tandem.kv_transfer.transport.notification_order import number_notification
from tandem.protocol.errors import IncompatiblePeer, PeerLost, TransferError

LISTENERS = """
import sys, os, psutil, torch
from tandem.kv_transfer.transport.factory import create_transport
host, mailbox = sys.argv[1:]
transport = create_transport(
    "nixl", worker_id="a", epoch=1, pool=torch.zeros(4, 1024), host=host, mailbox=mailbox
)
print(os.environ.get("UCX_NET_DEVICES"))
for connection in psutil.Process().net_connections("inet"):
    print(connection.laddr.ip)
if "/SYSV" in open("/proc/self/maps").read():
    print("shared:SystemV")
for number in os.listdir("/proc/self/fd"):
    file = f"/proc/self/fd/{number}"
    if os.path.exists(file) and os.readlink(file).startswith("/dev/shm/ucx"):
        print("shared", oct(os.stat(file).st_mode & 0o777), sep=":")
"""


class Opened(NamedTuple):
    """What a new process with a transport has opened."""

    devices: str  # that UCX is told to use
    addresses: set[str]  # of all sockets
    modes: set[str]  # of UCX's files of shared memory, and "SystemV" if it has such memory


def started(host: str, mailbox: str = "", **environment: str) -> Opened:
    known = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    result = subprocess.run(
        [sys.executable, "-c", LISTENERS, host, mailbox],
        cwd=Path(__file__).parents[2],
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    devices, *found = result.stdout.split()
    modes = {one.removeprefix("shared:") for one in found if one.startswith("shared:")}
    return Opened(devices, {one for one in found if not one.startswith("shared:")}, modes)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t-") as folder:  # a short one: the path of a socket has 107 bytes at most
        yield Path(folder)


@pytest.mark.cluster
def test_in_a_private_folder_it_opens_no_port_and_private_memory(folder: Path) -> None:
    opened = started("127.0.0.1", f"ipc://{folder}/a")
    assert (opened.addresses, opened.modes) == (set(), {"0o600"})


@pytest.mark.cluster
def test_what_forbids_copies_between_processes_leaves_it_its_port(folder: Path) -> None:
    opened = started("127.0.0.1", f"ipc://{folder}/a", UCX_TLS="all")
    assert (opened.devices, opened.addresses) == ("lo", {"127.0.0.1"})


@pytest.mark.cluster
def test_without_a_private_folder_it_listens_only_at_loopback() -> None:
    opened = started("127.0.0.1")
    assert opened.devices == "lo"
    assert opened.addresses <= {"127.0.0.1", "::1"}


@pytest.mark.cluster
def test_the_operator_and_other_hosts_choose_the_devices() -> None:
    assert started("127.0.0.1", UCX_NET_DEVICES="all").devices == "all"
    assert started("192.0.2.7").devices == "None"


@pytest.fixture(scope="module")
def transport() -> Any:
    transport = create_transport("nixl", worker_id="a", epoch=1, pool=torch.zeros(4, 1024))
    yield transport
    transport.close()


@pytest.fixture(scope="module")
def described() -> list[Any]:
    """The memory of another worker, by field."""
    other = create_transport("nixl", worker_id="b", epoch=1, pool=torch.zeros(4, 1024))
    fields: list[Any] = msgspec.msgpack.decode(other.local_metadata())
    other.close()
    return fields


BROKEN = [(position, value) for position in range(6) for value in (-1, 2**63, "ROM", b"", None, [], 0)]
BROKEN.remove((5, None))  # so has a worker without a mailbox


@pytest.mark.parametrize(("position", "value"), BROKEN, ids=str)
def test_a_description_of_no_memory_is_refused(
    transport: Transport, described: list[Any], position: int, value: Any
) -> None:
    fields = [*described[:position], value, *described[position + 1 :]]
    with pytest.raises(TransferError, match="metadata cannot be read"):
        transport.add_peer("b", 1, msgspec.msgpack.encode(fields))


def neighbour(folder: Path, worker_id: str) -> Transport:
    return create_transport(
        "nixl", worker_id=worker_id, epoch=1, pool=torch.zeros(4, 1024), mailbox=f"ipc://{folder}/{worker_id}"
    )


def test_a_worker_with_a_port_and_one_without_tell_each_other_so(transport: Transport, folder: Path) -> None:
    without = neighbour(folder, "b")
    try:
        with pytest.raises(IncompatiblePeer, match="port"):
            transport.add_peer("b", 1, without.local_metadata())
        with pytest.raises(IncompatiblePeer, match="port"):
            without.add_peer("a", 1, transport.local_metadata())
    finally:
        without.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda mailbox: ["ipc:///tmp/elsewhere/b", mailbox[1]],
        lambda mailbox: [mailbox[0], ["another machine", *mailbox[1][1:]]],
        lambda mailbox: [mailbox[0], [mailbox[1][0], mailbox[1][1], 1]],
        lambda mailbox: ["x" * 1000, mailbox[1]],
        lambda mailbox: [mailbox[0], [mailbox[1][0], -5, 1]],
        lambda mailbox: "mine",
    ],
    ids=["another folder", "another machine", "a process that is gone", "a long name", "no process", "no mailbox"],
)
def test_notifications_go_only_to_neighbours(folder: Path, change: Callable[[Any], Any]) -> None:
    ours, theirs = neighbour(folder, "a"), neighbour(folder, "b")
    try:
        fields = msgspec.msgpack.decode(theirs.local_metadata())
        fields[-1] = change(fields[-1])
        with pytest.raises((TransferError, PeerLost)):
            ours.add_peer("b", 1, msgspec.msgpack.encode(fields))
        ours.add_peer("b", 1, theirs.local_metadata())
    finally:
        ours.close()
        theirs.close()


def test_what_a_mailbox_holds_that_no_worker_sent_is_dropped(folder: Path) -> None:
    ours = neighbour(folder, "a")
    with zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        stranger.connect(f"ipc://{folder}/a")
        for frames in ([b""], [b"b#1"], [b"b#1", b"x", b"y"], [b"\xff#1", b"x" * 40], [b"b#1", b"x" * 40]):
            stranger.send_multipart(frames)
        stranger.send_multipart([b"c#1", number_notification(1, 0, b"heard")])
        arrived: list[Any] = []
        deadline = time.monotonic() + 20
        while not arrived and time.monotonic() < deadline:
            arrived += ours.poll()
    ours.close()
    assert arrived == [("c", 1, b"heard")]

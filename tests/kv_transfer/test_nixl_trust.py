"""What NIXL's transport lets in: where it listens, whom it hears, which descriptions of memory it takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kv_transfer.transport import Transport, create_transport
from protocol.errors import TransferError

LISTENERS = """
import sys, os, psutil, torch
from kv_transfer.transport import create_transport
transport = create_transport("nixl", worker_id="a", epoch=1, pool=torch.zeros(4, 1024), host=sys.argv[1])
print(os.environ.get("UCX_NET_DEVICES"))
for connection in psutil.Process().net_connections("inet"):
    if connection.status == psutil.CONN_LISTEN:
        print(connection.laddr.ip)
"""


def started(host: str, **environment: str) -> list[str]:
    """The network devices that UCX is told to use, and the addresses at which a new process listens."""
    known = {name: value for name, value in os.environ.items() if name != "UCX_NET_DEVICES"}
    result = subprocess.run(
        [sys.executable, "-c", LISTENERS, host],
        cwd=Path(__file__).parents[2],
        env=known | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return result.stdout.split()


def test_on_one_machine_it_listens_at_loopback_alone() -> None:
    devices, *addresses = started("127.0.0.1")
    assert devices == "lo"
    assert set(addresses) <= {"127.0.0.1", "::1"}, addresses


def test_the_operator_and_other_hosts_choose_the_devices() -> None:
    assert started("127.0.0.1", UCX_NET_DEVICES="all")[0] == "all"
    assert started("192.0.2.7")[0] == "None"


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
BROKEN.remove((2, 0))  # device 0 is one


@pytest.mark.parametrize(("position", "value"), BROKEN, ids=str)
def test_a_description_of_no_memory_is_refused(
    transport: Transport, described: list[Any], position: int, value: Any
) -> None:
    fields = [*described[:position], value, *described[position + 1 :]]
    with pytest.raises(TransferError):
        transport.add_peer("b", 1, msgspec.msgpack.encode(fields))


def test_notifications_of_no_worker_are_dropped(transport: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Agent:
        def get_new_notifs(self) -> dict[str, list[bytes]]:
            return {name: [b"x" * 40] for name in ("stranger", "a#", "a#x", "#1", "a#-1", "x" * 5000 + "#1")}

    agent, transport._agent = transport._agent, Agent()
    try:
        assert transport.poll() == []
    finally:
        transport._agent = agent
    assert caplog.text.count("no worker is called so") == 6

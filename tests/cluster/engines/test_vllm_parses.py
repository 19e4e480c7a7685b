"""vLLM's own parser and classes read the commands that Tandem makes.

Set TANDEM_VLLM_PYTHON as for the end-to-end tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tandem.cluster.engines import vllm
from tandem.cluster.engines.server import Sockets
from tests.support.managed import engine_server

VLLM_PYTHON = os.environ.get("TANDEM_VLLM_PYTHON", "")
SOCKETS = Sockets(8001, 5600, "tcp://*:5601", "tcp://*:5602", "ab")


def command(**fields: Any) -> list[str]:
    server = engine_server(num_gpus=1.0, arguments=("-tp", "2"), **({"host_cache_bytes": 64 * 10**9} | fields))
    return vllm.command(server, SOCKETS)


@pytest.mark.skipif(not VLLM_PYTHON, reason="TANDEM_VLLM_PYTHON is not set")
def test_vllm_makes_the_connectors_that_were_meant(tmp_path: Path) -> None:
    commands = [
        command(disk_cache_path="/ssd/kv"),
        command(disk_cache_path="/ssd/kv", is_disaggregated=False),
        command(is_disaggregated=False),
        command(host_cache_bytes=0),
    ]
    script = Path(__file__).parents[2] / "support" / "parse_by_vllm.py"
    done = subprocess.run(
        [VLLM_PYTHON, script], input=json.dumps(commands), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    offloading = ["OffloadingConnector", "ab", "TieringOffloadingSpec"]
    assert json.loads(done.stdout.splitlines()[-1]) == [
        [["MultiConnector", "ab"], ["NixlPullConnector", "ab"], [*offloading, "FileSystemTierManager"]],
        [[*offloading, "FileSystemTierManager"]],
        [offloading],
        [["NixlPullConnector", "ab"]],
    ]

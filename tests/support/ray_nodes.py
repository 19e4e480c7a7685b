"""A Ray cluster of several nodes on this machine: one `ray start` for each, at a loopback address of its own.

Each has its own folder, home folder and ports, and all of them demand a token. Every process is ended by its handle:
`ray stop` would also end the Ray clusters of others.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.server import START_S
from tests.support.waiting import until

TOKEN = "0123456789abcdef" * 4
JOIN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}  # in the environment of who joins
_ADDRESS = re.compile(r"ray start --address='([^']+)'")
_OBJECT_STORE_BYTES = 80_000_000  # Ray's smallest is 75 MiB


class RayNode:
    """One node, from its start to its end or death."""

    def __init__(self, ip: str, *, head: str = "", num_cpus: int = 1, env: dict[str, str] | None = None) -> None:
        """Joins the cluster at the address `head`; without one it is the head of a new cluster."""
        self.ip = ip
        self._joins = bool(head)
        self.folder = Path(tempfile.mkdtemp(prefix="t-"))  # short: Ray puts sockets in it
        self.home = self.folder / "home"
        self.home.mkdir()
        self._log = self.folder / "log"
        role = [f"--address={head}"] if head else ["--head", "--port=0", "--include-dashboard=false"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *role),
                    *(f"--node-ip-address={ip}", f"--num-cpus={num_cpus}", f"--temp-dir={self.folder / 'ray'}"),
                    f"--object-store-memory={_OBJECT_STORE_BYTES}",
                ],
                cwd=self.folder,
                env=environment | JOIN | {"HOME": str(self.home)} | (env or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: set[psutil.Process] = set()

    def wait_started(self) -> RayNode:
        """Return once it is part of the cluster, and the head has told where others join it, a few lines later."""
        sign = re.compile("Ray runtime started") if self._joins else _ADDRESS
        until(lambda: sign.search(self.log) or self._process.poll() is not None, START_S, lambda: self.log)
        assert self._process.poll() is None, self.log
        return self

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def address(self) -> str:
        """Where other nodes join, if this is the head."""
        match = _ADDRESS.search(self.log)
        assert match is not None, self.log
        return match[1]

    def processes(self) -> set[psutil.Process]:
        """All processes of the node, ever seen."""
        with suppress(psutil.NoSuchProcess):
            self._seen |= {psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(True)}
        return self._seen

    def kill(self) -> None:
        """End everything on the node at once, as if its power failed; with it, what it has on disk."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        assert not psutil.wait_procs(self._seen, timeout=10)[1]
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> None:
        """End Ray on this node as `ray stop` does; whatever stays is killed."""
        processes = self.processes()
        self._process.send_signal(signal.SIGTERM)
        psutil.wait_procs(processes, timeout=10)
        self.kill()


@contextmanager
def ray_cluster(*ips: str, head_cpus: int = 1, env: dict[str, str] | None = None) -> Iterator[list[RayNode]]:
    """A node at each address; the first is the head. Nodes that the block adds to the list are ended too."""
    nodes: list[RayNode] = []
    try:
        nodes.append(RayNode(ips[0], num_cpus=head_cpus, env=env).wait_started())
        nodes += [RayNode(ip, head=nodes[0].address, num_cpus=1, env=env) for ip in ips[1:]]
        for node in nodes[1:]:
            node.wait_started()
        yield nodes
    finally:
        for node in reversed(nodes):
            node.stop()

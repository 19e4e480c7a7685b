"""Hosts on one machine, each in namespaces of its own: network, processes, mounts, shared memory and name.

A host has an address in a network that only these hosts see. Its user tandem, who is root there, has a home folder.
`/tmp`, `/run` and `/var/log` are its own too; it sees the rest of the machine's files. Making one needs root. When its
first process ends, as it does with this process at the latest, the kernel ends all others in it, and takes back its
network and mounts. So nothing can be left behind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

# The home folder and what is mounted in it may be below /tmp, which disappears.
_INIT = """
set -e
home=$1 name=$2
shift 2
mount --make-rprivate /
while [ $# -gt 0 ]; do
    mkdir -p "$home/$1"
    mount --bind --options ro "$2" "$home/$1"
    shift 2
done
mount -t tmpfs tmpfs /srv
mkdir /srv/tandem
mount --rbind "$home" /srv/tandem
for place in /tmp /run /var/log /dev/shm; do mount -t tmpfs tmpfs "$place"; done
mkdir /run/sshd
{ echo "tandem:x:0:0::/srv/tandem:/bin/bash"; cat /etc/passwd; } >/run/passwd  # ssh takes ~ from the first
mount --bind /run/passwd /etc/passwd
hostname "$name"
ip link set lo up
echo ready
read -r _ || true
"""
_TIMEOUT_S = 60.0
HOME = "/srv/tandem"  # of the hosts' user


def why_no_hosts() -> str:
    """Why this process cannot make hosts; "" if it can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    missing = [program for program in ("unshare", "nsenter", "ip", "mount") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    trial = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return trial.stderr.strip()


class Host:
    """One host, from its start to its end."""

    def __init__(self, name: str, ip: str, folder: Path, mounts: Mapping[str, Path]) -> None:
        """`folder` is its user's home folder. `mounts` are folders to read, by their place in it."""
        self.name, self.ip, self.home = name, ip, folder
        namespaces = ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child"]
        mounted = [word for place, source in mounts.items() for word in (place, str(source))]
        self._process = subprocess.Popen(
            ["unshare", *namespaces, "bash", "-c", _INIT, "init", str(folder), name, *mounted],
            stdin=subprocess.PIPE,  # its first process ends with this pipe
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n", f"host {name} does not start"
        [first] = psutil.Process(self._process.pid).children()
        self._first = first
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def pid(self) -> int:
        """Its first process."""
        return self._first.pid

    def command(self, words: Sequence[str], env: Mapping[str, str] | None = None) -> list[str]:
        """The command that runs these words on the host, in the home folder, with only this environment."""
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        variables = {"HOME": HOME, "USER": "tandem", "PATH": path, "LANG": "C.UTF-8"} | dict(env or {})
        inside = [
            "env",
            "--ignore-environment",
            f"--chdir={HOME}",
            *(f"{name}={value}" for name, value in variables.items()),
            *words,
        ]
        return ["nsenter", "--target", str(self.pid), "--all", *inside]

    def start(self, *words: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process on the host; `options` are those of `Popen`. It ends with the host at the latest."""
        command = self.command(words, env)
        self._started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options))
        return self._started[-1]

    def run(self, *words: str, timeout_s: float = _TIMEOUT_S, env: Mapping[str, str] | None = None) -> str:
        """Run a command on the host; its output. Raises AssertionError with the output if it fails."""
        finished = subprocess.run(
            self.command(words, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert finished.returncode == 0, f"{' '.join(words)} on {self.name}: {finished.returncode}\n{finished.stdout}"
        return finished.stdout

    def kill(self) -> None:
        """End everything on the host at once, as if its power failed."""
        self._process.kill()  # the kernel then kills its first process, and with that one all others
        self._process.communicate()
        for process in self._started:
            process.wait(_TIMEOUT_S)
        psutil.wait_procs([self._first], timeout=_TIMEOUT_S)
        assert not self._first.is_running(), f"host {self.name} does not end"


@contextmanager
def hosts(*names: str, network: str = "10.77.0", mounts: Mapping[str, Path] | None = None) -> Iterator[list[Host]]:
    """Hosts with these names at `network`.1, .2 and so on. Traffic between them passes a bridge on the first one.

    Each can read the folders `mounts`, given by their places in its home folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="tandem-hosts-"))
    made: list[Host] = []
    try:
        for number, name in enumerate(names, start=1):
            home = folder / name
            home.mkdir(mode=0o700)
            made.append(Host(name, f"{network}.{number}", home, mounts or {}))
        first = made[0]
        first.run("ip", "link", "add", "bridge", "type", "bridge")
        first.run("ip", "address", "add", f"{first.ip}/24", "dev", "bridge")
        first.run("ip", "link", "set", "bridge", "up")
        for number, host in enumerate(made[1:], start=2):
            connect(first, host, f"port{number}")
        yield made
    finally:
        for host in reversed(made):
            host.kill()
        shutil.rmtree(folder, ignore_errors=True)


def connect(switch: Host, host: Host, port: str) -> None:
    """Lay a cable from the host's eth0 to a port of the bridge. Its default route is the first host."""
    in_network_of = ["nsenter", "--target", str(switch.pid), "--net"]  # not in its processes: `ip` looks up our pids
    veth = ["ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
    subprocess.run([*in_network_of, *veth], check=True, timeout=_TIMEOUT_S)
    switch.run("ip", "link", "set", port, "master", "bridge", "up")
    host.run("ip", "address", "add", f"{host.ip}/24", "dev", "eth0")
    host.run("ip", "link", "set", "eth0", "up")
    host.run("ip", "route", "add", "default", "via", switch.ip)

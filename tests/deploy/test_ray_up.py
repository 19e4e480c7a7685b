"""`ray up cluster/ray/tandem-local.yaml` for real: from the laptop's command to an answer to `ray down`.

Four hosts in namespaces of their own (`tests/support/hosts.py`): a laptop and the three machines of the file, each with
an sshd. What differs from real machines: they have Python's packages already, so `make setup` installs only Tandem, and
they have the model. With `pytest -s` the test prints what a user would see.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.model_store import resolve_model
from tests.support.hosts import HOME, Host, hosts, why_no_hosts
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parents[2]
FILE = "cluster/ray/tandem-local.yaml"
NOT_COPIED = (".venv*", ".git", "__pycache__", ".*_cache", "bench-results", "build", "*.egg-info", "shared")
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
RAY = (f"{HOME}/machine/bin/python", "-m", "ray.scripts.scripts")
SSHD = f"""
Port 22
HostKey {HOME}/.sshd/host_key
AuthorizedKeysFile {HOME}/.ssh/authorized_keys
PidFile none
UsePAM no
UseDNS no
PasswordAuthentication no
"""
UP_S, SERVED_S, DOWN_S = 400.0, 300.0, 240.0  # deadlines, several times what a quiet machine needs


def why_not() -> str:
    missing = [program for program in ("/usr/sbin/sshd", "ssh", "ssh-keygen", "rsync") if shutil.which(program) is None]
    return f"missing: {' '.join(missing)} (Debian: openssh-server rsync)" if missing else why_no_hosts()


def make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=30)


def prepare_laptop(laptop: Host, addresses: list[str]) -> None:
    """A checkout with the user's addresses in the file, and an ssh key."""
    make_key(laptop.home / ".ssh" / "id_ed25519")
    shutil.copytree(REPOSITORY, laptop.home / "tandem", ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
    file = laptop.home / "tandem" / FILE
    text = file.read_text()
    for example, address in zip(("192.0.2.10", "192.0.2.11", "192.0.2.12"), addresses, strict=True):
        assert text.count(example) == 1
        text = text.replace(example, address)
    file.write_text(text)


def prepare_machine(machine: Host, laptop: Host) -> None:
    """An sshd that lets the laptop's key in, and an environment that finds this machine's packages."""
    make_key(machine.home / ".sshd" / "host_key")
    (machine.home / ".ssh").mkdir(mode=0o700)
    shutil.copy(laptop.home / ".ssh" / "id_ed25519.pub", machine.home / ".ssh" / "authorized_keys")
    (machine.home / ".sshd" / "config").write_text(SSHD)
    (machine.home / ".bashrc").write_text("export TANDEM_ALLOW_CUDA=1 PIP_NO_INDEX=1\n")  # nothing can be downloaded
    venv = machine.home / "tandem" / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    (venv / SITE / "machine.pth").write_text(f"{HOME}/machine/{SITE}\n")
    script = f"#!{HOME}/tandem/.venv/bin/python\nfrom ray.scripts.scripts import main\nmain()\n"
    (venv / "bin" / "ray").write_text(script)
    (venv / "bin" / "ray").chmod(0o755)
    machine.start("/usr/sbin/sshd", "-D", "-f", f"{HOME}/.sshd/config")
    until(lambda: "LISTEN" in machine.run("ss", "-ltn"), 30)


@pytest.fixture
def lab() -> Iterator[list[Host]]:
    if reason := why_not():
        pytest.skip(reason)
    mounts = {"machine": Path(sys.prefix), ".cache/tandem/models": resolve_model().parent}
    with hosts("laptop", "head", "worker-1", "worker-2", mounts=mounts) as (laptop, *machines):
        prepare_laptop(laptop, [machine.ip for machine in machines])
        for machine in machines:
            prepare_machine(machine, laptop)
        yield [laptop, *machines]


def type_in(laptop: Host, *words: str, timeout_s: float = 60) -> str:
    """Run a command in the laptop's checkout, and show it as a terminal would."""
    shown = " ".join(words).replace(" ".join(RAY), "ray")
    print(f"\n$ {shown}", flush=True)
    output = laptop.run("bash", "-c", 'cd ~/tandem && exec "$@"', "bash", *words, timeout_s=timeout_s)
    print(output, flush=True)
    return output


def test_a_cluster_serves_from_ray_up_to_ray_down(lab: list[Host]) -> None:
    laptop, head, *workers = lab
    told = type_in(laptop, "bash", "scripts/cluster-secrets.sh").splitlines()
    (key,) = [line for line in told if line.startswith("sk-")]
    type_in(laptop, *RAY, "up", "--yes", FILE, timeout_s=UP_S)
    log = head.home / "tandem-serve.log"
    until(lambda: re.search("^Serving|^tandem: ", log.read_text(), re.MULTILINE), SERVED_S, lambda: explain(head))
    type_in(laptop, *RAY, "exec", FILE, "cat ~/tandem-serve.log")
    question = {"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    curl = ("curl", "-s", "http://127.0.0.1:8000/v1/chat/completions", "-H", "Content-Type: application/json")
    ssh = ("ssh", "-o", "StrictHostKeyChecking=no", "-o", "LogLevel=ERROR", f"tandem@{head.ip}")
    quoted = [f"'{word}'" for word in (*curl, "-H", f"Authorization: Bearer {key}", "-d", json.dumps(question))]
    answer = json.loads(type_in(laptop, *ssh, *quoted))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    refused = json.loads(head.run(*curl, "-d", json.dumps(question)))
    assert refused["error"]["code"] == "invalid_api_key"
    pools = json.loads(head.run("curl", "-s", "http://127.0.0.1:8000/v1/pools", "-H", f"Authorization: Bearer {key}"))
    roles = {role: [worker["host"] for worker in pools["roles"][role]] for role in ("prefill", "decode")}
    assert sorted(roles["prefill"] + roles["decode"]) == [worker.ip for worker in workers]
    for machine in (head, *workers):
        assert machine.run("stat", "-c", "%a", ".ray/auth_token", ".config/tandem/api-keys").split() == ["600", "600"]
    type_in(laptop, *RAY, "down", "--yes", FILE, timeout_s=UP_S)
    for machine in (head, *workers):  # the workers' Ray ends a minute after it lost its head
        until(lambda machine=machine: not left_on(machine), DOWN_S, lambda machine=machine: str(left_on(machine)))


def left_on(machine: Host) -> list[str]:
    """Command lines of Ray's and our processes there."""
    lines = machine.run("ps", "-eo", "args").splitlines()
    return [line for line in lines if "ray" in line or "tandem serve" in line or "tandem.cluster" in line]


def explain(head: Host) -> str:
    return head.run("bash", "-c", "tail -n 50 ~/tandem-serve.log /tmp/ray/session_latest/logs/monitor.* 2>&1")

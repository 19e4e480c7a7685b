"""TCP ports for servers that are told where to listen, and hosts as they are written before a port."""

from __future__ import annotations

import contextlib
import random
import socket

from tandem.protocol.errors import WorkerError

_PORTS = range(20_000, 32_000)  # below the ephemeral ports: no connection takes one until the server listens on it
_ATTEMPTS = 100


def free_ports(host: str, count: int) -> int:
    """The first of `count` ports in a row that nobody uses now. Raises `WorkerError` if none are found."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(_ATTEMPTS if count < len(_PORTS) else 0):
        first = random.choice(_PORTS[: len(_PORTS) - count])
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # one of them is taken
            for port in range(first, first + count):
                stack.enter_context(socket.socket(family)).bind((host, port))
            return first
    raise WorkerError(f"{count} free ports in a row were not found at {host}")


def bracketed(host: str) -> str:
    """The host as it is written before a port."""
    return f"[{host}]" if ":" in host else host

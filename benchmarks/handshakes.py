"""How long streams are silent when many clients begin TLS at once.

    python -m benchmarks.handshakes

A server speaks HTTPS, and another process has opened connections to it. The event loop stands still while that process
sends a ClientHello on each of them, so that all wait when the loop goes on: the worst case. The figures are CPU time of
the loop's thread, which hardly depends on what else the machine does: the longest time from one chance of a stream to
send to its next one, and the time until all have the server's part of the handshake.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from cryptography.hazmat.primitives.asymmetric import rsa
from prometheus_client import CollectorRegistry

from benchmarks.common import arguments, console, print_table, write_result
from tandem.frontend.http.listening import listening
from tandem.frontend.http.server import http_server
from tandem.protocol.config import RouterConfig
from tandem.runtime.signals import wait_for_any
from tests.support.certificates import Authority

_SIZES = (1, 256, 1000)
_TIMEOUT_S = 60.0


class _Burst(NamedTuple):
    longest_s: float  # between two chances of a stream to send
    all_s: float  # until all new connections were answered


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise NotImplementedError("nobody sends a request")


def _other_process(port: int, count: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.handshakes", "--burst", str(port), str(count)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _burst(config: RouterConfig, count: int) -> _Burst:
    """One burst of ClientHellos."""
    with listening("127.0.0.1", 0) as listener:
        async with http_server(_no_app, config, listener, CollectorRegistry()) as server:
            await wait_for_any(server.serving, server.has_started)
            with _other_process(listener.getsockname()[1], count) as other:
                assert other.stdout is not None
                assert other.stdin is not None
                while len(server.server_state.connections) < count:  # noqa: ASYNC110  (nobody tells)
                    await asyncio.sleep(0.01)
                other.stdin.write(b"go\n")
                other.stdin.flush()
                other.stdout.readline()  # all are sent, and this thread has not looked at them
                loop, done = asyncio.get_running_loop(), asyncio.Event()
                loop.add_reader(other.stdout, done.set)
                longest_s, began_s = 0.0, time.thread_time()
                last_s = began_s
                async with asyncio.timeout(_TIMEOUT_S):
                    while not done.is_set():
                        await asyncio.sleep(0)  # one iteration of the loop
                        now_s = time.thread_time()
                        longest_s, last_s = max(longest_s, now_s - last_s), now_s
                loop.remove_reader(other.stdout)
                return _Burst(longest_s, last_s - began_s)


def _send_hellos(port: int, count: int) -> None:
    """The other process: waits for a line, prints one when all hellos are sent, and one when all are answered."""
    hello = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    content = hello.read()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            selector.register(one, selectors.EVENT_READ)
        sys.stdin.readline()
        for waiting in selector.get_map().values():
            assert isinstance(waiting.fileobj, socket.socket)
            waiting.fileobj.sendall(content)
        print("sent", flush=True)
        num_waiting = count
        while num_waiting:
            for ready, _ in selector.select():
                assert isinstance(ready.fileobj, socket.socket)
                if not ready.fileobj.recv(65536):
                    raise OSError("a connection was refused")
                selector.unregister(ready.fileobj)
                num_waiting -= 1
        print("answered", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--burst", type=int, nargs=2, metavar=("PORT", "COUNT"), help="be the other process")
    settings = parser.parse_args()
    if settings.burst:
        _send_hellos(*settings.burst)
        return
    sizes, rounds = ((1, 20), 1) if settings.quick else (_SIZES, settings.rounds)
    found: dict[str, list[_Burst]] = {}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        authority = Authority(Path(folder))
        certificates = {"P-256": authority.issue("curve")}
        certificates["RSA 2048"] = authority.issue("rsa", key=rsa.generate_private_key(65537, 2048))
        for _ in range(rounds):
            for name, (certificate, key) in certificates.items():
                config = RouterConfig(tls_cert=str(certificate), tls_key=str(key), max_connections=4000)
                for size in sizes:
                    found.setdefault(f"{name}, {size}", []).append(runner.run(_burst(config, size)))
            console.print("[dim]measured a round[/]")
    rows = [
        [name, *(1e3 * statistics.median(column) for column in zip(*bursts, strict=True))]
        for name, bursts in found.items()
    ]
    print_table("new connections at once", ["key, connections", "longest silence ms", "all ms"], rows, "CPU time")
    write_result("handshakes", settings, found)


if __name__ == "__main__":
    main()

"""HTTPS with real clients and hostile ones: handshakes, limits, reloads. `test_protocol.py` runs over TLS as well."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import shutil
import socket
import ssl
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.http import connections
from tandem.frontend.http.listening import listening
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.http.server import HttpServer
from tandem.frontend.http.tls import check_server_tls, scheme_of
from tandem.frontend.http.tls_connection import TlsConnection
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.runtime import followed_tls, time_slicer
from tandem.runtime.signals import wait_for_any
from tests.support.certificates import DAY, Authority
from tests.support.quick_server import http_server
from tests.support.waiting import eventually

REQUEST = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


class Port:
    """A server over TLS, and the authority that its clients trust."""

    def __init__(self, server: HttpServer, port: int, authority: Authority, registry: CollectorRegistry) -> None:
        self.server = server
        self.number = port
        self.url = f"https://localhost:{port}"
        self.authority = authority
        self._registry = registry

    def trusting(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.authority.ca_file)

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=self.trusting(), timeout=30, **options)

    async def raw(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.number)

    def num_failures(self, reason: str) -> float:
        return self._registry.get_sample_value("tandem_tls_handshake_failures_total", {"reason": reason}) or 0.0

    def metric(self, name: str) -> float:
        value = self._registry.get_sample_value(f"tandem_tls_{name}")
        assert value is not None
        return value


class Flood:
    """A client whose records are collected, and then sent all at once."""

    def __init__(self, port: Port, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = port.trusting().wrap_bio(self._incoming, self._outgoing, server_hostname="localhost")

    @classmethod
    async def connected(cls, port: Port) -> Flood:
        flood = cls(port, *await port.raw())
        await flood.connect()
        return flood

    async def connect(self) -> None:
        while not self._is_connected():
            await self.answered()

    async def answered(self) -> None:
        """Send what the handshake has to send, and wait for more of the server's part of it."""
        self._is_connected()
        self._writer.write(self._outgoing.read())
        self._incoming.write(await self._reader.read(65_536))

    def _is_connected(self) -> bool:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._session.do_handshake()
            return True
        return False

    def send(self, content: bytes) -> None:
        self._session.write(content)

    async def deliver(self) -> bytes:
        """Send the records; everything that the server answers."""
        self._writer.write(self._outgoing.read())
        answer = b""
        while data := await self._reader.read(65_536):
            self._incoming.write(data)
            with contextlib.suppress(ssl.SSLWantReadError):
                while part := self._session.read(65_536):
                    answer += part
        self._writer.close()
        return answer


def client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"x-scheme", scope["scheme"].encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(folder: Path, app: Any = echo, **config: Any) -> AsyncIterator[Port]:
    authority, registry = Authority(folder), CollectorRegistry()
    certificate, key = authority.issue()
    router = RouterConfig(**{"tls_cert": str(certificate), "tls_key": str(key)} | config)
    with listening("127.0.0.1", 0) as listener:
        async with http_server(app, router, listener, registry) as server, asyncio.timeout(60):
            await wait_for_any(server.serving, server.has_started)
            yield Port(server, listener.getsockname()[1], authority, registry)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_that_knows_the_ca_gets_answers(tmp_path: Path, version: ssl.TLSVersion) -> None:
    async with serving(tmp_path) as port:
        context = port.trusting()
        context.minimum_version = context.maximum_version = version
        async with httpx.AsyncClient(base_url=port.url, verify=context) as client:
            for size in (0, 1, 16_384, 16_385, 3_000_000):
                body = random.Random(size).randbytes(size)
                answer = await client.post("/", content=body)
                assert (answer.content, answer.headers["x-scheme"]) == (body, "https")
        assert port.num_failures("refused") == 0


async def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as port:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(port.authority.ca_file)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1"):
            context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol.version"):
            await asyncio.open_connection("127.0.0.1", port.number, ssl=context, server_hostname="localhost")
        assert port.num_failures("refused") == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_a_client_cannot_renegotiate(tmp_path: Path) -> None:
    async with serving(tmp_path) as port:
        command = ["openssl", "s_client", "-tls1_2", "-CAfile", str(port.authority.ca_file), "-verify_return_error"]
        client = await asyncio.create_subprocess_exec(
            *command, "-connect", f"localhost:{port.number}", stdin=PIPE, stdout=DEVNULL, stderr=PIPE
        )
        _, errors = await client.communicate(b"R\n")  # R at the start of a line asks for it
        assert b"renegotiat" in errors.lower()
        assert client.returncode != 0


async def test_plain_http_is_answered_with_the_remedy(tmp_path: Path) -> None:
    async with serving(tmp_path) as port, httpx.AsyncClient() as client:
        answer = await client.post(f"http://localhost:{port.number}/v1/models", json={"a": "b" * 100_000})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "This port speaks HTTPS: write https:// in the URL."
        assert port.num_failures("plain_http") == 1


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])  # as in production
async def test_garbage_ends_its_connection_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(7)
    valid = client_hello()
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path) as port:
            for _ in range(200):
                starts = [valid, valid * 3, b"\x16\x03\x01\x40\x00", b"\x80" + valid, rng.randbytes(99)]
                sent = bytearray(rng.choice(starts))
                for _ in range(rng.randint(0, 4)):
                    sent[rng.randrange(len(sent))] = rng.randrange(256)
                reader, writer = await port.raw()
                writer.write(sent)
                writer.write_eof()
                await reader.read()
                writer.close()
            async with port.client() as client:
                assert (await client.get("/")).status_code == 200
    assert not [record for record in caplog.records if record.name != "httpx"], (
        "a client's garbage is not worth a log line"
    )


async def test_a_handshake_that_does_not_end_has_a_deadline(tmp_path: Path) -> None:
    async with serving(tmp_path, header_timeout_s=0.3) as port:
        silent, half, slow = [await port.raw() for _ in range(3)]
        half[1].write(b"\x16\x03\x01\x02\x00\x01")
        async with port.client() as client:
            assert (await client.get("/")).status_code == 200
        for byte in b"\x16\x03\x01\x02\x00" + bytes(400):  # it sends all the time, and still has one deadline
            if slow[0].at_eof() or slow[0].exception():
                break
            slow[1].write(bytes([byte]))
            await asyncio.sleep(0.02)  # all bytes take far longer than the deadline
        for reader, writer in (silent, half, slow):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        assert port.num_failures("timeout") == 3


async def test_an_endless_handshake_is_cut(tmp_path: Path) -> None:
    async with serving(tmp_path) as port:
        reader, writer = await port.raw()
        fragment = b"\x16\x03\x01\x40\x00" + b"\x01\x01\x00\x00" + bytes(0x4000 - 4)  # of a ClientHello of 64 KB
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                writer.write(fragment)
                await writer.drain()
            await reader.read()
        await eventually(lambda: port.num_failures("refused") == 1)
        writer.close()


async def test_other_work_goes_on_between_handshakes_that_begin_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_slicer, "BUDGET_S", 0.0)
    begun: list[TlsConnection] = []
    shake_hands = TlsConnection._shake_hands

    def note(connection: TlsConnection) -> None:
        begun.append(connection)
        shake_hands(connection)

    monkeypatch.setattr(TlsConnection, "_shake_hands", note)
    async with serving(tmp_path) as port:
        with contextlib.ExitStack() as stack:
            address = ("127.0.0.1", port.number)
            clients = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(20)]
            await eventually(lambda: len(port.server.server_state.connections) == 20)
            hello = client_hello()
            for client in clients:
                client.sendall(hello)  # the loop sees all of them at once
            num_begun = [0]
            while num_begun[-1] < 20:
                await asyncio.sleep(0)
                num_begun.append(len(begun))
            assert max(after - before for before, after in pairwise(num_begun)) == 1
            for client in clients:
                assert client.recv(1) == b"\x16"  # the server's part of the handshake


async def test_records_of_one_byte_leave_time_for_others_and_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client sends a body byte by byte, all at once; another one is answered long before it is read."""
    monkeypatch.setattr(time_slicer, "BUDGET_S", 0.0)
    monkeypatch.setattr(connections, "_MAX_READ_S", 0.0)
    async with serving(tmp_path) as port:
        flood = await Flood.connected(port)
        body = random.Random(0).randbytes(30_000)
        flood.send(b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        for number in range(len(body)):
            flood.send(body[number : number + 1])
        answer = asyncio.create_task(flood.deliver())
        async with port.client() as client:
            for _ in range(3):
                assert (await client.get("/")).status_code == 200
        assert not answer.done()
        assert (await answer).endswith(body)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
async def test_a_client_that_updates_its_keys_for_ever_is_cut(tmp_path: Path) -> None:
    """An update costs the client a few bytes, and the server more than a token of a stream."""
    async with serving(tmp_path) as port:
        command = ["openssl", "s_client", "-tls1_3", "-quiet", "-no_ign_eof", "-CAfile", str(port.authority.ca_file)]
        client = await asyncio.create_subprocess_exec(
            *command, "-connect", f"localhost:{port.number}", stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stderr is not None

        async def update(count: int) -> int:
            assert client.stdin is not None
            assert client.stderr is not None
            for number in range(count):
                with contextlib.suppress(ConnectionError):
                    client.stdin.write(b"K\n")
                    await client.stdin.drain()
                while not (line := await client.stderr.readline()).startswith(b"KEYUPDATE"):
                    if not line:
                        return number
            return count

        assert await update(5) == 5
        client.stdin.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        assert await client.stdout.readline() == b"HTTP/1.1 200 OK\r\n"
        assert await update(1000) < 1000
        await client.communicate()


async def test_no_handshake_is_made_with_a_client_that_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_made, shake_hands = 0, TlsConnection._shake_hands

    def counted(self: TlsConnection) -> None:
        nonlocal num_made
        num_made += 1
        shake_hands(self)

    monkeypatch.setattr(TlsConnection, "_shake_hands", counted)
    hello = client_hello()
    async with serving(tmp_path) as port:
        for _ in range(50):
            with socket.create_connection(("127.0.0.1", port.number)) as client:  # the server has no time meanwhile
                client.sendall(hello)
        await eventually(lambda: port.num_failures("client_left") == 50)
        async with port.client() as client:
            assert (await client.get("/")).status_code == 200
    assert num_made <= 4, "of the last client"


async def test_half_open_handshakes_make_room_for_complete_ones(tmp_path: Path) -> None:
    async with serving(tmp_path, max_connections=10) as port, port.client() as client:
        half_open = [await port.raw() for _ in range(40)]
        for _, writer in half_open:
            writer.write(b"\x16\x03\x01\x02\x00")
        for _ in range(3):
            assert (await client.get("/")).status_code == 200
        await eventually(lambda: port.num_failures("shed") >= 30)
        assert len(port.server.server_state.connections) <= 11
        for _, writer in half_open:
            writer.close()
        await eventually(lambda: len(port.server.server_state.connections) == 1)
        assert port.num_failures("shed") + port.num_failures("client_left") == 40


async def test_silent_connections_make_room_for_a_handshake_under_way(tmp_path: Path) -> None:
    async with serving(tmp_path, max_connections=10) as port:
        client = Flood(port, *await port.raw())
        silent = [await port.raw() for _ in range(connections.NUM_RESERVED)]
        await client.answered()
        silent += [await port.raw() for _ in range(40)]
        await eventually(lambda: port.num_failures("shed") >= 30)
        await client.connect()
        client.send(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert b"200 OK" in await client.deliver()
        for _, writer in silent:
            writer.close()


async def test_a_client_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    left = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        writer = ResponseWriter(scope, send)
        await writer.start([])
        writer.write(b"first")
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(tmp_path, wait) as port:
        for is_abrupt in (True, False):
            left.clear()
            reader, writer = await asyncio.open_connection("localhost", port.number, ssl=port.trusting())
            writer.write(REQUEST)
            await reader.readuntil(b"first")
            writer.transport.abort() if is_abrupt else writer.close()
            await left.wait()
        await eventually(lambda: not port.server.server_state.connections)


async def test_an_ended_connection_leaves_nothing_of_openssl_behind(tmp_path: Path) -> None:
    """It has tens of KB that the collector does not count; a full collection may be thousands of connections away."""
    async with serving(tmp_path) as port:
        context = port.trusting()

        def talk() -> bytes:
            with context.wrap_socket(socket.create_connection(("127.0.0.1", port.number), timeout=30)) as client:
                client.sendall(REQUEST)
                return client.recv(100)

        context.check_hostname = False
        gc.collect()
        gc.disable()
        try:
            assert (await asyncio.to_thread(talk)).startswith(b"HTTP/1.1 200")
            _, writer = await port.raw()
            writer.close()
            await eventually(lambda: port.num_failures("client_left") == 1 and not port.server.server_state.connections)
            assert not [one for one in gc.get_objects() if type(one) is ssl.SSLObject]
        finally:
            gc.enable()


async def test_the_server_drains_and_ends_half_open_handshakes(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        await echo(scope, receive, send)

    async with serving(tmp_path, wait) as port:
        half_open, half_open_writer = await port.raw()
        reader, writer = await asyncio.open_connection("localhost", port.number, ssl=port.trusting())
        writer.write(REQUEST)
        await eventually(lambda: port.server.num_running == 1)
        port.server.drain()
        with contextlib.suppress(ConnectionResetError):
            assert await half_open.read() == b""
        go_on.set()
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        await port.server.serving
        half_open_writer.close()
        writer.close()


async def test_client_certificates_are_required_if_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "clients"
    folder.mkdir()
    clients, strangers = Authority(folder, "clients"), Authority(folder, "strangers")
    async with serving(tmp_path, tls_client_ca=str(clients.ca_file)) as port:
        known = port.trusting()
        known.load_cert_chain(*clients.issue("friend"))
        async with httpx.AsyncClient(base_url=port.url, verify=known) as client:
            assert (await client.get("/")).status_code == 200
        unknown = port.trusting()
        unknown.load_cert_chain(*strangers.issue("stranger"))
        for context in (port.trusting(), unknown):
            async with httpx.AsyncClient(base_url=port.url, verify=context) as client:
                with pytest.raises((httpx.TransportError, ssl.SSLError), match=r"(?i)alert"):
                    await client.get("/")
        assert port.num_failures("refused") == 2


async def test_a_renewed_certificate_is_used_without_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_tls, "POLL_INTERVAL_S", 0.02)
    async with serving(tmp_path) as port, port.client() as kept, asyncio.TaskGroup() as group:
        before, served, is_over = port.metric("certificate_expiry_timestamp_seconds"), [0, 0], asyncio.Event()

        async def ask(number: int) -> None:
            while not is_over.is_set():
                async with port.client() as client:  # each has its own connection
                    assert (await client.get("/")).status_code == 200
                assert (await kept.get("/")).status_code == 200
                served[number] += 1

        for number in range(2):
            group.create_task(ask(number))
        for days in (60, 90, 120):
            port.authority.issue(expires_in=days * DAY)  # writes one file after the other
            await eventually(
                lambda days=days: port.metric("certificate_expiry_timestamp_seconds") > before + (days - 31) * 86400
            )
        num_before = list(served)
        await eventually(lambda: all(now > then + 2 for now, then in zip(served, num_before, strict=True)))
        is_over.set()
        shown = await asyncio.to_thread(ssl.get_server_certificate, ("localhost", port.number))
        assert shown.encode() == (tmp_path / "server.crt").read_bytes()
        assert port.metric("reloads_total") >= 3
        assert port.metric("files_damaged") == 0


async def test_damaged_files_keep_the_certificate_and_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(followed_tls, "POLL_INTERVAL_S", 0.02)
    async with serving(tmp_path) as port:
        expiry = port.metric("certificate_expiry_timestamp_seconds")
        (tmp_path / "server.key").write_bytes(b"half of a k")
        await eventually(lambda: port.metric("files_damaged") == 1)
        async with port.client() as client:
            assert (await client.get("/")).status_code == 200
        assert port.metric("certificate_expiry_timestamp_seconds") == expiry
        port.authority.issue()
        await eventually(lambda: port.metric("files_damaged") == 0)
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "server.key' has no private key that can be used" in errors[0]
    assert "The certificates loaded before stay in use" in errors[0]


async def test_bytes_after_the_end_of_tls_are_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path) as port:
        with socket.create_connection(("127.0.0.1", port.number), timeout=30) as raw:
            raw.setblocking(True)
            context = port.trusting()

            def talk() -> bytes:
                with context.wrap_socket(raw, server_hostname="localhost") as client:
                    client.sendall(b"no HTTP at all\r\n\r\n")
                    answer = b""
                    while part := client.recv(65_536):
                        answer += part
                    client.sendall(b"more" * 1000)
                    return answer

            assert b"This is not valid HTTP" in await asyncio.to_thread(talk)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tls_cert": "a"}, "tls_cert='a' is given without tls_key; give both"),
        ({"tls_key": "a"}, "tls_key='a' is given without tls_cert; give both"),
        ({"tls_client_ca": "a"}, "tls_client_ca='a' is given without tls_cert; give --tls-cert and --tls-key too"),
    ],
)
def test_settings_that_need_each_other(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RouterConfig(**given)  # type: ignore[arg-type]


def test_files_are_checked_before_anything_starts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = Authority(tmp_path).issue()
    config = RouterConfig(tls_cert=str(certificate), tls_key=str(key))
    check_server_tls(config)
    assert (scheme_of(config), scheme_of(RouterConfig())) == ("https", "http")
    assert not caplog.records
    key.chmod(0o644)
    check_server_tls(config)
    assert "has mode 0644, by which other users can read" in caplog.text
    key.unlink()
    with pytest.raises(ConfigError, match=r"tls_key=.* cannot be read"):
        check_server_tls(config)

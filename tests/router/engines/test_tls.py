from __future__ import annotations

import socket
import ssl
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.config import ExternalEnginesConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import WorkerState
from tandem.router.engines.config import spec_from
from tandem.router.engines.tls import check_engine_tls, engine_tls, tls_reason
from tandem.router.engines.upstream import Upstream
from tandem.runtime import followed_tls
from tests.support.certificates import DAY, Authority
from tests.support.engines_harness import COMPLETIONS, completion, routing, routing_by_decider, spec_of
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.waiting import eventually

EXPIRY = "tandem_engine_client_certificate_expiry_timestamp_seconds"


class Certificates:
    """A CA that signs engines, and another that signs their clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines, self.clients = Authority(folder, "engines"), Authority(folder, "clients")
        client = self.clients.issue("router")
        self.of_router = {"tls_cert": str(client[0]), "tls_key": str(client[1]), "tls_ca": str(self.engines.ca_file)}

    def engine(self, *, asks: bool = True, **options: Any) -> AbstractContextManager[FakeServer]:
        """An engine; `asks`: it wants a client's certificate. `options` are those of its certificate."""
        certificate, key = self.engines.issue("engine", **options)
        tls: dict[str, Any] = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        if asks:
            tls |= {"ssl_ca_certs": str(self.clients.ca_file), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return fake_openai(**tls)


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed_tls, "POLL_INTERVAL_S", 0.0)


async def failure_of(url: str, **files: str) -> str:
    """Why a request to this engine fails before it has an answer."""
    spec = spec_from({"name": "e", "url": url} | files, "test")
    upstream = Upstream(spec.url, {}, connect_timeout_s=15, tls=engine_tls(spec, ExternalEnginesConfig()))
    with pytest.raises(OSError) as caught:
        await upstream.post("/v1/completions", b"{}", "req-1")
    upstream.close()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("for_all", [False, True])
async def test_both_sides_show_their_certificates(certificates: Certificates, for_all: bool) -> None:
    named = {f"engine_{name.removeprefix('tls_')}": path for name, path in certificates.of_router.items()}
    with certificates.engine() as fake:
        spec = spec_of(fake, "e", **({} if for_all else certificates.of_router))
        async with routing(spec, **(named if for_all else {})) as router:
            for stream in (False, True):
                answer = await router.client.post(COMPLETIONS, json=completion(stream=stream))
                assert answer.status_code == 200
            metrics = (await router.client.get("/metrics")).text
        assert f'{EXPIRY}{{engine="e"}}' in metrics
        assert 'tandem_engine_tls_files_damaged{engine="e"} 0.0' in metrics


async def test_frontend_processes_show_them_too(certificates: Certificates, tmp_path: Path) -> None:
    with certificates.engine() as fake:
        async with routing_by_decider(tmp_path, spec_of(fake, "e", **certificates.of_router)) as decider:
            frontend = await decider.frontend("one")
            assert (await frontend.client.post(COMPLETIONS, json=completion())).status_code == 200


async def test_a_wrong_certificate_is_named(certificates: Certificates) -> None:
    ca = str(certificates.engines.ca_file)
    with certificates.engine(asks=False) as fake:
        unknown = await failure_of(fake.url, tls_ca=str(certificates.clients.ca_file))
        assert unknown == "Unreachable: its certificate is refused: unable to get local issuer certificate"
        assert "unable to get local issuer" in await failure_of(fake.url), "the system does not know this CA"
        plain = await failure_of(fake.url.replace("https", "http"))
        assert "Unreachable" not in plain, "it is reached, and hangs up"
    with certificates.engine(asks=False, expires_in=-DAY) as fake:
        assert (
            await failure_of(fake.url, tls_ca=ca) == "Unreachable: its certificate is refused: certificate has expired"
        )
    with certificates.engine(asks=False, hosts=("engine.example",)) as fake:
        mismatch = await failure_of(fake.url, tls_ca=ca)
        assert mismatch.startswith("Unreachable: its certificate is refused: IP address mismatch")
        mismatch = await failure_of(fake.url.replace("127.0.0.1", "localhost"), tls_ca=ca)
        assert mismatch.startswith("Unreachable: its certificate is refused: Hostname mismatch")


async def test_an_engine_that_refuses_our_certificate_is_named(certificates: Certificates) -> None:
    ca = str(certificates.engines.ca_file)
    with certificates.engine() as fake:  # its server hangs up without a word
        reason = await failure_of(fake.url, tls_ca=ca)
        assert "closed the connection before any answer; it may ask for another certificate of ours" in reason
        assert not fake.requests


async def test_an_engine_that_resets_a_new_connection_is_named(certificates: Certificates) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*certificates.engines.issue("engine"))

    def reset_one(listener: socket.socket) -> None:
        with tls.wrap_socket(listener.accept()[0], server_side=True) as connection:
            connection.recv(1)  # the request has arrived, and is not answered
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        resetting = thread.submit(reset_one, listener)
        port = listener.getsockname()[1]
        reason = await failure_of(f"https://127.0.0.1:{port}", tls_ca=str(certificates.engines.ca_file))
        resetting.result(10)
    assert "closed the connection before any answer; it may ask for another certificate of ours" in reason


def test_what_an_engine_says_of_our_certificate_is_named() -> None:
    alert = ssl.SSLError(1, "")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert tls_reason(alert) == "it refuses our certificate or our TLS: tlsv13 alert certificate required"


async def test_an_engine_that_speaks_no_tls_is_not_asked_without(fake_a: FakeServer) -> None:
    reason = await failure_of(fake_a.url.replace("http:", "https:"))
    assert reason.startswith("Unreachable: it does not speak TLS as it should")
    assert not fake_a.requests


async def test_an_engine_gets_nothing_until_its_certificate_is_known(certificates: Certificates) -> None:
    ca = certificates.folder / "current.pem"
    ca.write_bytes(certificates.engines.ca_file.read_bytes())
    with certificates.engine() as fake:
        spec = spec_of(fake, "e", **(certificates.of_router | {"tls_ca": str(ca)}))
        async with routing(spec) as router:
            assert (await router.client.post(COMPLETIONS, json=completion())).status_code == 200
            num_requests = len(fake.requests)
            ca.write_bytes(certificates.clients.ca_file.read_bytes())  # renewed, and wrong
            await eventually(lambda: router.engine("e").state is not WorkerState.READY, timeout_s=20)
            assert "its certificate is refused" in router.engine("e").reason
            assert (await router.client.post(COMPLETIONS, json=completion())).status_code in (502, 503)
            assert len(fake.requests) == num_requests
            ca.write_bytes(certificates.engines.ca_file.read_bytes())
            await router.all_ready("e")
            assert (await router.client.post(COMPLETIONS, json=completion())).status_code == 200


async def test_a_certificate_error_counts_for_the_circuit(certificates: Certificates) -> None:
    ca = certificates.folder / "current.pem"
    ca.write_bytes(certificates.engines.ca_file.read_bytes())
    with certificates.engine(asks=False) as fake:
        async with routing(spec_of(fake, "e", tls_ca=str(ca)), probe_interval_s=60.0, breaker_failures=1) as router:
            ca.write_bytes(certificates.clients.ca_file.read_bytes())
            answer = await router.client.post(COMPLETIONS, json=completion())
            assert answer.status_code in (502, 503)
            assert router.engine("e").num_failures == 1
            assert router.engine("e").breaker.num_opened == 1
            assert not fake.requests


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"url": "http://h:1", "tls_ca": "ca"}, r"engines\[0\]: tls_ca needs https, but url='http://h:1'; write"),
        ({"url": "https://h:1", "tls_cert": "c"}, r"engines\[0\]: tls_cert='c' is given without tls_key; give both"),
        ({"url": "https://h:1", "tls_key": "k"}, r"engines\[0\]: tls_key='k' is given without tls_cert; give both"),
    ],
)
def test_keys_that_do_not_fit_are_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_from(entry, "engines[0]")


def test_files_are_checked_before_anything_starts(certificates: Certificates) -> None:
    config = ExternalEnginesConfig()
    spec = spec_from({"name": "e", "url": "https://h:1"} | certificates.of_router, "test")
    check_engine_tls([spec], config)
    missing = spec_from({"name": "e", "url": "https://h:1", "tls_ca": "/no/ca"}, "test")
    with pytest.raises(ConfigError, match=r"engine e: tls_ca='/no/ca' cannot be read: No such file"):
        check_engine_tls([missing], config)
    with pytest.raises(ConfigError, match="engine_ca='/no/ca' cannot be read: No such file"):
        check_engine_tls([], ExternalEnginesConfig(engine_ca="/no/ca"))
    with pytest.raises(ConfigError, match="engine_cert='c' is given without engine_key; give both"):
        ExternalEnginesConfig(engine_cert="c")

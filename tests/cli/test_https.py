from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from tandem.cli.main import run
from tests.support.certificates import Authority
from tests.support.fake_openai import FakeServer, fake_openai

BENCH = ["--concurrency", "2", "--requests", "4", "--input-tokens", "6", "--output-tokens", "3", "--warmup", "0"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def https_server(authority: Authority) -> Iterator[FakeServer]:
    certificate, key = authority.issue(hosts=("127.0.0.1",))
    with fake_openai(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        yield server


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_a_ca_of_the_environment_is_trusted(
    https_server: FakeServer,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert run([command, "--url", https_server.url, *(BENCH if command == "bench" else [])]) == 0
    shown = capsys.readouterr()
    assert "TTFT" in shown.out + shown.err


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_an_unknown_ca_is_refused(https_server: FakeServer, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run([command, "--url", https_server.url]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "certificate verify failed" in line
    assert "SSL_CERT_FILE=ca.pem" in line


def test_another_name_than_the_certificates_is_refused(
    https_server: FakeServer, authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca_file))
    url = https_server.url.replace("127.0.0.1", "localhost")
    assert run(["bench", "--url", url]) == 2
    assert "Hostname mismatch" in capsys.readouterr().err

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.cli.main import run
from tandem.cli.route import admin_token, route
from tandem.protocol.config import ExternalEnginesConfig, RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.settings import settings_of
from tests.support.fake_openai import FakeServer

FLAGS = inspect.signature(route).parameters


def test_flags_and_settings_of_the_engines_config_are_the_same() -> None:
    names = {field.name for config in (ExternalEnginesConfig, RouterConfig) for field in settings_of(config)}
    assert {field.name for field in settings_of(ExternalEnginesConfig)} <= FLAGS.keys()
    files = {"engines", "admin_token_file", "tenants", "api_key_file", "config"}  # read at once
    assert FLAGS.keys() - names == {"ctx", *files}
    for config in (ExternalEnginesConfig, RouterConfig):
        for field in settings_of(config):
            wanted = list(field.default) if isinstance(field.default, tuple) else field.default
            assert field.name not in FLAGS or FLAGS[field.name].default == wanted


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("route", "there are no engines and no way to add any"),
        ("route --engines /no/such/file", "engines='/no/such/file' cannot be read"),
        ("route --admin-token-file /no/such/file", "admin_token_file='/no/such/file' cannot be read"),
        ("route --max-attempts 2", "No such option: --max-attempts. See: tandem route --help"),
        ("route --api-key-file /no/such/file", "api_key_file='/no/such/file' cannot be read"),
        ("route --tenants /no/such/file", "tenants='/no/such/file' cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TANDEM_ADMIN_TOKEN", raising=False)
    assert run(words.split()) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_tokenizer_that_cannot_be_loaded_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.toml"
    path.write_text('[tokenizers]\nm = "/no/such/model"\n[[engines]]\nurl = "http://h:1"\nmodel = "m"\n')
    assert run(["route", "--engines", str(path), "--port", "0"]) == 2
    assert "tokenizers: 'm' = '/no/such/model' cannot be loaded" in capsys.readouterr().err


def test_the_admin_token_is_the_files_or_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN", "of the environment")
    assert admin_token("") == "of the environment"
    path = tmp_path / "token"
    path.write_text("of the file\n")
    assert admin_token(str(path)) == "of the file"
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        admin_token(str(path))
    path.write_text("a\nb\n")
    with pytest.raises(ConfigError, match="must be one line of visible ASCII"):
        admin_token(str(path))
    monkeypatch.setenv("TANDEM_ADMIN_TOKEN", "\udcff")
    with pytest.raises(ConfigError, match="TANDEM_ADMIN_TOKEN must be one line of visible ASCII"):
        admin_token("")


@contextmanager
def routing_process(path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command with torch and Ray out of reach, and its URL."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'ray', 'nixl'])); from tandem.cli.main import run; "
        f"sys.exit(run(['route', '--engines', {str(path)!r}, '--port', '0', '--probe-interval-s', '0.05']))"
    )
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "COLUMNS": "200"}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=root, env=env, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(60, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "Routing to 1 engine(s) on http://" in line, line + process.stderr.read()
        yield process, line.split()[5]
    finally:
        process.kill()
        process.wait()
        watchdog.cancel()
        assert process.stderr is not None
        process.stderr.close()


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + 20
    while httpx.get(f"{url}/ready", trust_env=False).status_code != 200:
        assert time.monotonic() < deadline, "no engine became ready"


def test_the_command_serves_without_torch_and_ray_and_ends_cleanly(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "engines.toml"
    path.write_text(f'[[engines]]\nname = "a"\nurl = "{server.url}"\nkind = "vllm"\n')
    body: dict[str, Any] = {"prompt": "a b", "max_tokens": 3, "stream": False}
    with routing_process(path) as (process, url):
        wait_ready(url)
        answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "word word word ")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0

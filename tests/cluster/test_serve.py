from __future__ import annotations

import io
import json
import shlex
import sys

import pytest
from rich.console import Console

from tandem.cluster.serve import print_welcome
from tandem.protocol.config import ClusterConfig, EngineConfig
from tandem.runtime.status_console import StatusConsole


def welcome(name: str) -> str:
    output = io.StringIO()
    config = ClusterConfig(engine=EngineConfig(model="m", served_model_name=name))
    print_welcome(config, 8123, Console(file=output, width=40, highlight=False), needs_key=False)
    return output.getvalue()


@pytest.mark.parametrize("name", ["toy", "it's", 'a "b"', "[/red]x", "[bold]y", "\u00fcber"])
def test_the_command_can_be_copied_whatever_the_models_name(name: str) -> None:
    text = welcome(name)
    assert name in text.replace("\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("  curl "))
    assert json.loads(shlex.split(line)[-1])["model"] == name


@pytest.mark.parametrize(
    ("found", "program", "expected"),
    [
        ("/usr/bin/tandem", "/usr/bin/tandem", "tandem chat"),
        (None, ".venv/bin/tandem", ".venv/bin/tandem chat"),
        (None, "/a b/tandem", "'/a b/tandem' chat"),
        (None, "/src/tandem/__main__.py", "tandem chat"),
    ],
)
def test_the_chat_command_is_one_that_this_users_shell_finds(
    found: str | None, program: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: found)
    monkeypatch.setattr(sys, "argv", [program, "serve"])
    assert f"\n  {expected} --url http://127.0.0.1:8123\n" in welcome("toy")


@pytest.mark.parametrize("error", [BrokenPipeError, OSError], ids=["pipe", "terminal"])
def test_a_welcome_that_nobody_reads_ends_nothing(error: type[OSError], monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    monkeypatch.setattr(sys, "stderr", Lost())
    config, console = ClusterConfig(engine=EngineConfig(model="m", served_model_name="toy")), StatusConsole()
    for _ in range(2):
        print_welcome(config, 8123, console, needs_key=False)
    assert console.quiet

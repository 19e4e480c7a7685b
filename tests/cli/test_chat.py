import io
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import httpx
import pytest

from tandem.cli.chat import ChatError, Conversation
from tandem.cli.main import run
from tandem.cli.options import without_controls
from tests.support.engines_harness import dead_url
from tests.support.fake_openai import FakeServer


def talk(server: FakeServer, text: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(["chat", "--url", server.url, "--max-tokens", "2", *options])


def test_piped_lines_are_turns(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(server, "hello\n\nand you?\n/exit\nnever sent\n", monkeypatch, "--system", "be brief") == 0
    captured = capsys.readouterr()
    assert captured.out == "word word \nword word \n"
    assert captured.err.count("TTFT") == 2
    assert "2 tokens" in captured.err
    assert [body["messages"] for body in server.requests] == [
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "word word "},
            {"role": "user", "content": "and you?"},
        ],
    ]
    assert server.requests[0]["model"] == "fake-model"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_shown_and_is_not_part_of_the_answer(server: FakeServer, name: str) -> None:
    server.extra = {name: "hm "}
    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(client, "m", options={"max_tokens": 1})
        assert "".join(conversation.ask("hello")) == "hm \n\nword "
    assert conversation.messages[-1] == {"role": "assistant", "content": "word "}


def test_reset_forgets_the_history(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(server, "hello\n/reset\nhello\n", monkeypatch) == 0
    assert server.requests[0] == server.requests[1]


def test_broken_stream_keeps_what_was_said(server: FakeServer) -> None:
    server.break_after = 1
    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(client, "m", options={"max_tokens": 3})
        with pytest.raises(ChatError, match="in the middle"):
            list(conversation.ask("hello"))
    assert conversation.messages[-1] == {"role": "assistant", "content": "word "}


@pytest.mark.parametrize(
    ("fault", "value", "shown", "error"),
    [
        ("status", 503, "", "not today (HTTP 503)"),
        ("break_after", 1, "word \n", "the server closed the connection in the middle of the answer"),
    ],
)
def test_an_error_has_a_line_of_its_own(
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
    value: int,
    shown: str,
    error: str,
) -> None:
    setattr(server, fault, value)
    assert talk(server, "hello\n", monkeypatch) == 2
    assert capsys.readouterr() == (shown, f"tandem: {error}\n")


def test_unknown_command_is_not_sent(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(server, "/clear\n", monkeypatch) == 2
    assert capsys.readouterr().err == "tandem: unknown command /clear; known: /exit, /quit, /reset\n"
    assert server.requests == []
    assert talk(server, "/etc/hosts holds what?\n", monkeypatch) == 0


def test_closing_an_answer_hangs_up(server: FakeServer) -> None:
    server.pause.clear()
    with httpx.Client(base_url=server.url) as client:
        conversation = Conversation(client, "m", options={"max_tokens": 3})
        answer = conversation.ask("hello")
        assert next(answer) == "word "
        answer.close()
        server.pause.set()
        assert conversation.messages[-1]["content"] == "word "
        assert "".join(conversation.ask("again")) == "word word word "


def test_refused_connection_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", "--url", dead_url()]) == 2
    error = capsys.readouterr().err
    assert "tandem serve" in error
    assert len(error.splitlines()) == 1


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(server: FakeServer) -> None:
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    server.pause.clear()
    command = [sys.executable, "-m", "tandem", "chat", "--url", server.url]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as process:
        os.close(theirs)  # only the child has it now: what we read ends when the child does
        guard = threading.Timer(30, process.kill)
        guard.start()
        terminal = open(ours, "rb+", buffering=0)  # noqa: SIM115  # closed below, after the process

        def read_until(text: bytes) -> bytes:
            seen = b""
            while text not in seen:
                seen += terminal.read(1024)
            return seen

        try:
            read_until(b"> ")
            terminal.write(b"hello\n")
            read_until(b"word")
            process.send_signal(signal.SIGINT)
            assert b"stopped" in read_until(b"> ")
            while process.poll() is None:  # a signal just before the terminal is read would only be noted
                process.send_signal(signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            assert process.returncode == 0
        finally:
            process.kill()
            guard.cancel()
            terminal.close()


def test_an_answer_keeps_its_lines_and_loses_escape_sequences() -> None:
    assert without_controls("a\tb\n\x1b[2J\x9b2Jé\u200d\r") == "a\tb\n[2J2Jé\u200d"

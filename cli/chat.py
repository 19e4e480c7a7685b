"""`tandem chat`: a conversation in the terminal, with the speed of each answer."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.markup import escape

from tandem.cli.http_client import error_message, server_client
from tandem.cli.options import ApiKey, ServedModel, ServerUrl, printable, without_controls
from tandem.protocol.errors import ConfigError, ServingError

_READ_TIMEOUT_S = 600.0  # a queued prompt gets no bytes for long
_LEAVE = {"/exit", "/quit"}
_COMMAND = re.compile(r"/\w+")


class ChatError(ServingError):
    """The server gave no answer, or only a part of one."""


class _Piece(NamedTuple):
    """Text of a stream."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class Conversation:
    """The messages so far and the server that continues them."""

    client: httpx.Client
    model: str
    messages: list[dict[str, str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    num_output_tokens: int = 0  # in the current answer

    def ask(self, text: str) -> Generator[str]:
        """Stream the answer to `text`, after the model's reasoning if it gives any.

        The question and the answer, even a partial one, join the history.
        """
        question = {"role": "user", "content": text}
        answer: list[str] = []
        self.num_output_tokens = 0
        try:
            has_reasoned = False
            for piece in self._stream([*self.messages, question]):
                if not piece.is_reasoning:
                    if has_reasoned and not answer:
                        yield "\n\n"
                    answer.append(piece.text)
                has_reasoned |= piece.is_reasoning
                yield piece.text
        finally:
            if answer:  # a question without any answer can be asked again
                self.messages += [question, {"role": "assistant", "content": "".join(answer)}]

    def _stream(self, messages: list[dict[str, str]]) -> Iterator[_Piece]:
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ChatError(error_message(response.status_code, response.read()))
            for event in _events(response.iter_lines()):
                if event.get("usage"):
                    self.num_output_tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    delta = choice["delta"]
                    if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
                        yield _Piece(reasoning, is_reasoning=True)
                    if content := delta.get("content"):
                        yield _Piece(content)


@dataclass(slots=True)
class _Speed:
    """Arrival times of one answer."""

    started_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    last_s: float = 0.0
    num_events: int = 0

    def count_event(self) -> None:
        """An event has arrived just now."""
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.num_events += 1

    def line(self, num_tokens: int) -> str:
        """TTFT and tokens per second. If the server reports no number, each event counts as one token."""
        num_tokens = num_tokens or self.num_events
        duration_s = self.last_s - self.first_s
        pace = f", {(num_tokens - 1) / duration_s:.1f} tok/s" if duration_s > 0 else ""
        return f"TTFT {(self.first_s - self.started_s) * 1e3:.0f} ms, {num_tokens} tokens{pace}"


def chat(
    url: ServerUrl = "http://127.0.0.1:8000",
    model: ServedModel = "",
    system: Annotated[str, typer.Option(help="System message at the start of the conversation.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="0 = always the likeliest token; unset = the server's.", show_default=False)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    api_key: ApiKey = "",
) -> int:
    """Chat with a model in the terminal.

    Each answer is followed by its time to the first token and its tokens per second. Ctrl-C stops an answer. At the
    prompt Ctrl-C, Ctrl-D and /exit leave, and /reset starts over. Each line of a piped standard input is one turn.

    [bold]Examples[/bold]

    [cyan]tandem chat[/cyan]

    [cyan]echo "What is the capital of France?" | tandem chat --temperature 0[/cyan]
    """
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    with server_client(url, api_key, read_timeout_s=_READ_TIMEOUT_S, lost_error=ChatError) as client:
        conversation = Conversation(client, model or _first_model(client), options=options)
        return _talk(conversation, system)


def _talk(conversation: Conversation, system: str) -> int:
    """Send every line of standard input until its end. On a terminal a failed answer does not end the conversation."""
    beginning = [{"role": "system", "content": system}] if system else []
    conversation.messages = list(beginning)
    is_terminal = sys.stdin.isatty()
    console = Console(highlight=False)
    if is_terminal:
        with contextlib.suppress(ImportError):  # some builds of Python lack it
            import readline  # noqa: F401  # gives input() editing and a history
        console.print(
            f"[bold]{escape(printable(conversation.model))}[/bold]  [dim]Ctrl-C stops an answer, /exit leaves[/dim]"
        )
    while (line := _read_line(is_terminal)) is not None and line not in _LEAVE:
        if line == "/reset":
            conversation.messages = list(beginning)
        elif line:
            try:
                _refuse_command(line)
                _answer(conversation, line, console)
            except ChatError as exc:
                if not is_terminal:
                    raise
                console.print(f"[red]{escape(printable(exc.message))}[/red]")
    return 0


def _refuse_command(line: str) -> None:
    """Raise ChatError for a misspelt command: it is not meant for the model."""
    if _COMMAND.fullmatch(line):
        raise ChatError(f"unknown command {line}; known: {', '.join([*sorted(_LEAVE), '/reset'])}")


def _read_line(is_terminal: bool) -> str | None:
    """The next line without its end; None at the end of the input, and when the user leaves."""
    try:
        return input("> " if is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(conversation: Conversation, text: str, console: Console) -> None:
    """Print the answer as it arrives, then its speed on a dim line (on stderr when the output is not a terminal)."""
    speed = _Speed()
    is_stopped = False
    pieces = conversation.ask(text)
    try:
        for piece in pieces:
            speed.count_event()
            console.out(without_controls(piece) if console.is_terminal else piece, end="", highlight=False)
            console.file.flush()
    except KeyboardInterrupt:
        is_stopped = True
        if not sys.stdin.isatty():
            raise
    except (ChatError, httpx.HTTPError):
        if speed.num_events:
            console.print()  # the error gets a line of its own
        raise
    finally:
        pieces.close()  # hangs up
    console.print()
    if speed.num_events:
        meter = console if console.is_terminal else Console(stderr=True, highlight=False)
        stopped = ", stopped" if is_stopped else ""
        meter.print(f"[dim]{speed.line(conversation.num_output_tokens)}{stopped}[/dim]")


def _events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream. Raises `ChatError` for an error event, and for a stream that ends before [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        content = line.removeprefix("data:").strip()
        if content == "[DONE]":
            return
        event = json.loads(content)
        if event.get("error"):
            raise ChatError(event["error"].get("message", "the server reported an error"))
        yield event
    raise ChatError("the server closed the connection in the middle of the answer")


def _first_model(client: httpx.Client) -> str:
    response = client.get("/v1/models")
    if response.status_code != 200:
        raise ChatError(error_message(response.status_code, response.content))
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as exc:
        raise ConfigError(f"url={client.base_url} does not list models; name one with --model") from exc

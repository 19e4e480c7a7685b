"""A streaming client that measures when each event of an OpenAI-compatible server arrives, at little CPU of its own.

The client often shares its cores with the server under test. httpx costs 130 us of CPU per streamed event; this
protocol over httptools and uvloop costs 18 us. It notes when bytes arrive, and parses JSON after the stream has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

Result = TypeVar("Result")

CUT = "cut by the client"  # error of a stream that the client cut on purpose

_NO_STATUS = 0  # the client cut before the answer began
_DATA = b"data:"
_DONE = b"[DONE]"


@dataclass(slots=True)
class StreamTiming:
    """One streamed answer. Times are `time.perf_counter()` seconds."""

    started_s: float
    finished_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list)  # only events that carry output tokens
    event_tokens: list[int] = field(default_factory=list)  # output tokens of each such event
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str = ""
    text: str = ""
    error: str = ""  # empty = the whole answer arrived

    @property
    def ttft_s(self) -> float:
        """Time to the first event with output; the stream must have one."""
        return self.event_times_s[0] - self.started_s

    @property
    def itl_s(self) -> list[float]:
        """Gaps between successive events with output: the pace that a reader sees, and its stalls."""
        return [later - earlier for earlier, later in itertools.pairwise(self.event_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first event; None if all output came in one event."""
        later_tokens = self.num_output_tokens - (self.event_tokens[0] if self.event_tokens else 0)
        if len(self.event_times_s) < 2 or later_tokens < 1:
            return None
        return (self.event_times_s[-1] - self.event_times_s[0]) / later_tokens


class MeasuringClient:
    """Client of one server. Each request has its own connection: a closed-loop test must not reuse a stalled one."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 600.0) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
            host, port = parts.hostname or "", parts.port
            host.encode("idna")  # as look-ups of the name encode it
        except ValueError as exc:
            raise ValueError(f"url={url!r} is not of the form http://host:port: {exc}") from exc
        if parts.scheme not in ("http", "https") or not host:
            raise ValueError(f"url={url!r} is not of the form http://host:port")
        self.host = host
        self.port = port or (443 if parts.scheme == "https" else 80)
        self.base_path = parts.path.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s  # for a whole request
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def stream_completion(
        self, prompt: str | list[int], *, model: str, max_tokens: int, **body: Any
    ) -> StreamTiming:
        """Stream one completion; `body` adds request fields such as ignore_eos, temperature or seed."""
        return await self.stream(
            "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": max_tokens, **body}
        )

    async def stream_chat(
        self, messages: list[dict[str, str]], *, model: str, max_tokens: int, **body: Any
    ) -> StreamTiming:
        """Stream one chat answer."""
        request = {"model": model, "messages": messages, "max_tokens": max_tokens, **body}
        return await self.stream("/v1/chat/completions", request)

    async def stream(self, path: str, body: dict[str, Any], *, cut_after_s: float | None = None) -> StreamTiming:
        """POST `body` as a streaming request. A failure of any kind is in `error` and is not raised.

        After `cut_after_s` the client hangs up: the timing holds what had arrived, and its error is `CUT`.
        """
        options = {"include_usage": True, "continuous_usage_stats": True}
        payload = msgspec.json.encode({"stream_options": options, **body, "stream": True})
        timing = StreamTiming(started_s=time.perf_counter())
        try:
            reply = await self._send("POST", path, payload, cut_after_s)
        except (OSError, TimeoutError) as exc:
            timing.error = str(exc) or f"no answer within {self.timeout_s:g} s"
            timing.finished_s = time.perf_counter()
            return timing
        timing.finished_s = reply.finished_s
        if reply.status not in (200, _NO_STATUS):
            timing.error = f"HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}"
        else:
            _parse_events(reply, timing)
        if reply.is_cut:
            timing.error = CUT
        return timing

    async def request_json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded answer of a plain request. Raises `OSError` for anything but JSON with status 200."""
        reply = await self._send(method, path, b"" if body is None else msgspec.json.encode(body))
        if reply.status != 200:
            raise OSError(f"{method} {path}: HTTP {reply.status}: {reply.body[:300].decode(errors='replace')}")
        try:
            return msgspec.json.decode(reply.body)
        except msgspec.DecodeError as exc:
            raise OSError(f"{method} {path}: the answer is not JSON ({exc})") from exc

    async def _send(self, method: str, path: str, payload: bytes, cut_after_s: float | None = None) -> _Reply:
        loop = asyncio.get_running_loop()
        head = (
            f"{method} {self.base_path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n{self._authorization}"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
        )
        async with asyncio.timeout(self.timeout_s):
            transport, reply = await loop.create_connection(
                lambda: _ReplyProtocol(loop.create_future()), self.host, self.port, ssl=self._tls
            )
            if cut_after_s is not None:
                loop.call_later(cut_after_s, reply.cut)
            try:
                transport.write(head.encode() + payload)
                return await reply.done
            finally:  # a cancelled request hangs up, as a client that leaves does
                # Over TLS, `close` would wait for the server's answer, perhaps longer than the event loop runs.
                transport.close() if self._tls is None else transport.abort()


def run_measured(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop, which costs a third of asyncio's own loop per event."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class _Reply(NamedTuple):
    """A whole answer. `marks` has (arrival time, bytes of body received so far) for each read that brought some.

    NOTE: The answer completes inside the read that brings its end, before that read is marked: await it first.
    """

    status: int
    body: bytearray
    marks: list[tuple[float, int]]
    is_cut: bool = False  # the client hung up before its end

    @property
    def finished_s(self) -> float:
        """When the last bytes of the body arrived."""
        return self.marks[-1][0] if self.marks else time.perf_counter()


class _ReplyProtocol(asyncio.Protocol):
    """Collects one HTTP answer and the arrival time of its parts."""

    def __init__(self, done: asyncio.Future[_Reply]) -> None:
        self.done = done
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()
        self._marks: list[tuple[float, int]] = []

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        size = len(self._body)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fail(f"malformed HTTP answer: {exc}")
            return
        if len(self._body) > size:
            self._marks.append((now, len(self._body)))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if not self.done.done():
            self.done.set_result(_Reply(self._parser.get_status_code(), self._body, self._marks))

    def cut(self) -> None:
        """End the answer with what has arrived."""
        if not self.done.done():
            self.done.set_result(_Reply(self._parser.get_status_code(), self._body, self._marks, is_cut=True))

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete an answer without a length, which ends with the connection; [DONE] shows whether it is whole."""
        if exc is None and self._parser.get_status_code() >= 200:
            self.on_message_complete()
        self._fail(f"connection lost after {len(self._body)} bytes of the answer" + (f": {exc}" if exc else ""))

    def _fail(self, message: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(message))


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None  # as vLLM calls it
    reasoning_content: str | None = None  # as others call it


class _EventChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def output(self) -> str:
        """Text of this event, from either API."""
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning or self.delta.reasoning_content or ""


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_EventChoice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


def _parse_events(reply: _Reply, timing: StreamTiming) -> None:
    """Fill `timing` from the events of a finished stream."""
    body = reply.body
    event_end = b"\r\n\r\n" if b"\r\n\r\n" in body else b"\n\n"  # JSON holds no raw line ends
    marks = iter(reply.marks)
    arrived_s, arrived_size = next(marks, (reply.finished_s, 0))
    pieces: list[str] = []
    start, is_done = 0, False
    while (end := body.find(event_end, start)) >= 0:
        while arrived_size < end + len(event_end):  # find the read that completed this event
            arrived_s, arrived_size = next(marks)
        line = body[start:end].strip()
        start = end + len(event_end)
        if not line.startswith(_DATA):
            continue  # a comment, which some servers send to keep the connection alive
        content = line[len(_DATA) :].strip()
        if content == _DONE:
            is_done = True
            break
        try:
            event = _decode_event(content)
        except msgspec.DecodeError as exc:
            timing.error = f"unreadable event {content[:200]!r}: {exc}"
            return
        if event.error is not None:
            timing.error = f"error event: {event.error}"
            return
        _apply_event(event, arrived_s, timing, pieces)
    timing.text = "".join(pieces)
    if not is_done:
        timing.error = "the stream ended without [DONE]"
    elif not timing.event_times_s:
        timing.error = "the stream brought no output"


def _apply_event(event: _Event, arrived_s: float, timing: StreamTiming, pieces: list[str]) -> None:
    """Add one event. Tokens are counted by running usage if the server sends it, else as one per event."""
    total: int | None = None
    if event.usage is not None:
        total = event.usage.completion_tokens
        timing.num_prompt_tokens = event.usage.prompt_tokens or timing.num_prompt_tokens
        if event.usage.prompt_tokens_details is not None:
            timing.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens or timing.num_cached_tokens
    if not event.choices:  # the last event, which has the final usage
        timing.num_output_tokens = timing.num_output_tokens if total is None else total
        return
    text = "".join(choice.output for choice in event.choices)
    for choice in event.choices:
        timing.finish_reason = choice.finish_reason or timing.finish_reason
    new_tokens = int(bool(text)) if total is None else total - timing.num_output_tokens
    if text or new_tokens > 0:
        pieces.append(text)
        timing.event_times_s.append(arrived_s)
        timing.event_tokens.append(new_tokens)
        timing.num_output_tokens += new_tokens

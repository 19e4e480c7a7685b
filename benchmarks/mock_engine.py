"""OpenAI-compatible mock servers that cost next to nothing, to measure routers in front of them.

    python -m benchmarks.mock_engine PORT [PORT ...]

One process serves all ports. Every stream gets one event per step, as an engine's batch does, each in a write of its
own. The `seed` of a request is the length of its steps in milliseconds, since routers pass that field on; with 0 the
next event follows as soon as the connection takes it. Answers are always the same, so that clients can check them. As
vLLM's, events have token ids if the request asks for them.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections import deque
from collections.abc import Sequence
from typing import cast

import msgspec
import uvloop

MODEL = "mock"
WORDS = (" the", " of", " and", " to", " in", " is", " that", " for", " was", " on")  # the answer repeats these

_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_SEED = re.compile(rb'"seed":\s*(\d+)')
_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream":\s*true')
_USAGE = re.compile(rb'"include_usage":\s*true')
_IDS = re.compile(rb'"return_token_ids":\s*true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PROMPT_TOKENS = 256
_MAX_UNSENT_BYTES = 16 * 1024  # of one connection


def expected_text(num_tokens: int) -> str:
    """Text of an answer with this many tokens."""
    return "".join(WORDS[i % len(WORDS)] for i in range(num_tokens))


def _envelope(kind: str, **fields: object) -> dict[str, object]:
    return {"id": "chatcmpl-0123456789abcdef0123456789abcdef", "object": kind, "created": 1, "model": MODEL, **fields}


def _usage(num_tokens: int) -> dict[str, object]:
    counts = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": num_tokens}
    return counts | {"total_tokens": _PROMPT_TOKENS + num_tokens, "prompt_tokens_details": {"cached_tokens": 128}}


def _framed(event: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(event), event)


def _chunk(choices: list[dict[str, object]], **fields: object) -> bytes:
    return _framed(
        b"data: " + msgspec.json.encode(_envelope("chat.completion.chunk", choices=choices, **fields)) + b"\n\n"
    )


def _piece(word: str, finish_reason: str | None, token_ids: list[int] | None) -> dict[str, object]:
    piece: dict[str, object] = {"index": 0, "delta": {"content": word}, "logprobs": None}
    return piece | {"finish_reason": finish_reason, "token_ids": token_ids}


_PIECES = [_chunk([_piece(word, None, None)]) for word in WORDS]
_ENDS = [_chunk([_piece(word, "length", None)]) for word in WORDS]
_PIECES_WITH_IDS = [_chunk([_piece(word, None, [i + 1000])]) for i, word in enumerate(WORDS)]
_ENDS_WITH_IDS = [_chunk([_piece(word, "length", [i + 1000])]) for i, word in enumerate(WORDS)]
_PROMPT_IDS = list(range(20_000, 20_000 + _PROMPT_TOKENS))
_FIRST_WITH_IDS = _chunk([_piece(WORDS[0], None, [1000])], prompt_token_ids=_PROMPT_IDS)
_DONE = _framed(b"data: [DONE]\n\n")


def _answer(body: bytes, content_type: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (content_type, len(body))
    return head + body


def _plain(num_tokens: int) -> bytes:
    message = {"role": "assistant", "content": expected_text(num_tokens)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    return _answer(msgspec.json.encode(_envelope("chat.completion", choices=[choice], usage=_usage(num_tokens))))


_GET = {
    b"/health": _answer(b"{}"),
    b"/version": _answer(b'{"version":"0.32.0"}'),
    b"/v1/models": _answer(
        msgspec.json.encode({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 8192}]})
    ),
}
_INFO = {"model_path": MODEL, "served_model_name": MODEL, "is_generation": True, "dp_size": 1}
for _path in (b"/get_model_info", b"/model_info", b"/get_server_info", b"/server_info"):  # for the SGLang family
    _GET[_path] = _answer(msgspec.json.encode(_INFO))
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class _Steps:
    """Writes the next event of every stream with the same step length, in one callback."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: list[_Connection] = []
        self._is_ticking = False

    def add(self, stream: _Connection) -> None:
        self._streams.append(stream)
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(self._step_s, self._tick)

    def _tick(self) -> None:
        self._streams = [stream for stream in self._streams if stream.write_next()]
        loop = asyncio.get_running_loop()
        if not self._streams:
            self._is_ticking = False
        elif all(stream.is_full for stream in self._streams):
            loop.call_later(max(self._step_s, 0.0005), self._tick)  # do not spin while nobody reads
        elif self._step_s:
            loop.call_later(self._step_s, self._tick)
        else:
            loop.call_soon(self._tick)


class _Connection(asyncio.Protocol):
    """One connection; answers its requests one after another."""

    def __init__(self, steps: dict[float, _Steps], plain: dict[int, bytes]) -> None:
        self._steps = steps
        self._plain = plain
        self._received = b""
        self._unsent: deque[bytes] = deque()
        self.is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it
        self._transport.set_write_buffer_limits(high=_MAX_UNSENT_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unsent.clear()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end]
            length = _LENGTH.search(head)
            end += 4 + (int(length[1]) if length else 0)
            if len(self._received) < end:
                return
            body, self._received = self._received[len(head) + 4 : end], self._received[end:]
            self._answer(head, body)

    def write_next(self) -> bool:
        """Write the stream's next event; returns whether more remain for later steps."""
        if self.is_full:
            return True
        if not self._unsent or self._transport.is_closing():
            return False
        self._transport.write(self._unsent.popleft())
        if len(self._unsent) > 2:
            return True
        while self._unsent:  # usage with [DONE], and the end, belong to the last step
            self._transport.write(self._unsent.popleft())
        return False

    def _answer(self, head: bytes, body: bytes) -> None:
        method, path, _ = head.split(b" ", 2)
        if method == b"GET":
            self._transport.write(_GET.get(path.partition(b"?")[0], _NOT_FOUND))
            return
        num_tokens = _number(_MAX_TOKENS, body, 16)
        if not _STREAM.search(body):
            if num_tokens not in self._plain:
                self._plain[num_tokens] = _plain(num_tokens)
            self._transport.write(self._plain[num_tokens])
            return
        has_ids = _IDS.search(body)
        pieces, ends = (_PIECES_WITH_IDS, _ENDS_WITH_IDS) if has_ids else (_PIECES, _ENDS)
        self._unsent.extend(pieces[i % len(WORDS)] for i in range(num_tokens - 1))
        self._unsent.append(ends[(num_tokens - 1) % len(WORDS)])
        if has_ids and num_tokens > 1:
            self._unsent[0] = _FIRST_WITH_IDS
        usage = _chunk([], usage=_usage(num_tokens)) if _USAGE.search(body) else b""
        self._unsent.extend((usage + _DONE, b"0\r\n\r\n"))
        self._transport.write(_STREAM_HEAD + self._unsent.popleft())
        step_s = _number(_SEED, body, 0) / 1e3
        if step_s not in self._steps:
            self._steps[step_s] = _Steps(step_s)
        self._steps[step_s].add(self)


def _number(pattern: re.Pattern[bytes], body: bytes, default: int) -> int:
    match = pattern.search(body)
    return int(match[1]) if match else default


async def _serve(ports: Sequence[int]) -> None:
    steps: dict[float, _Steps] = {}
    plain: dict[int, bytes] = {}
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: _Connection(steps, plain), "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


def main() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve([int(port) for port in sys.argv[1:]]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)

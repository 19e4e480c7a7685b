"""An engine that streams a script as vLLM does, token by token and with token ids. Tests move its streams elsewhere.

Its tokens are runs of bytes, so a token may end within a character. It answers with the script only if it is asked for
what follows the tokens of the script; otherwise with '#'. `script_on` gives a `fake_openai` server these answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi.responses import JSONResponse, Response, StreamingResponse

from tests.support.fake_openai import FakeServer

PROMPT_IDS = [7, 8, 9]
_GARBAGE = 99
_FIRST = 100  # id of the script's first token


@dataclass
class Script:
    """`pieces` are the bytes of each token."""

    pieces: list[bytes]
    prompt_ids: list[int] = field(default_factory=lambda: list(PROMPT_IDS))

    @property
    def ids(self) -> list[int]:
        return [_FIRST + i for i in range(len(self.pieces))]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes, ids)).decode(errors="replace")

    def next_id(self, ids: Sequence[int]) -> int:
        num_output = len(ids) - len(self.prompt_ids)
        is_known = list(ids) == [*self.prompt_ids, *self.ids[:num_output]]
        return self.ids[num_output] if is_known and num_output < len(self.pieces) else _GARBAGE

    def _bytes(self, token_id: int) -> bytes:
        if token_id < _GARBAGE:
            return f"<{token_id}>".encode()
        return b"#" if token_id == _GARBAGE else self.pieces[token_id - _FIRST]


def events(script: Script, body: dict[str, Any], *, is_chat: bool, tokens_per_event: int = 1) -> Iterator[bytes]:
    """The stream of a request, event by event."""
    given = body.get("prompt")
    ids = list(given) if isinstance(given, list) else list(script.prompt_ids)
    num_prompt, has_ids = len(ids), bool(body.get("return_token_ids"))
    kind, name = ("chat.completion.chunk", "chatcmpl-x") if is_chat else ("text_completion", "cmpl-x")
    head = {"id": f"{name}{len(ids)}", "object": kind, "created": 1700000000, "model": body.get("model", "m")}
    prompt = {"prompt_token_ids": ids[:] if has_ids else None}
    if is_chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield _event(head | {"choices": [role]} | prompt)
    for num, (text, new_ids, finish) in enumerate(_pieces(script, body, ids, tokens_per_event)):
        choice: dict[str, Any] = {"index": 0} | ({"delta": {"content": text}} if is_chat else {"text": text})
        choice |= {"logprobs": None, "finish_reason": finish and finish[0]}
        if finish:
            choice["stop_reason"] = finish[1]
        choice["token_ids"] = new_ids if has_ids else None
        if not is_chat:
            choice |= prompt if num == 0 else {"prompt_token_ids": None}
        yield _event(head | {"choices": [choice]})
    usage = {"prompt_tokens": num_prompt, "completion_tokens": len(ids) - num_prompt, "total_tokens": len(ids)}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield _event(head | {"choices": [], "usage": usage})
    yield b"data: [DONE]\n\n"


def _pieces(
    script: Script, body: dict[str, Any], ids: list[int], tokens_per_event: int
) -> Iterator[tuple[str, list[int], tuple[str, str | None] | None]]:
    """Yield text and token ids; the last item also has the finish reason.

    As in vLLM, text ends with a whole token and a whole character, and text that may begin a stop string is held back.
    """
    stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
    num_held = max(map(len, stops), default=1) - 1
    num_prompt, text, num_shown, num_tokens = len(ids), "", 0, 0
    new_ids: list[int] = []
    max_tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    while True:
        token = script.next_id(ids)
        ids.append(token)
        new_ids.append(token)
        num_tokens += 1
        decoded = script.decode(ids[num_prompt:])
        text = text if decoded.endswith("\ufffd") else decoded
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        finish: tuple[str, str | None] | None = None
        if found:
            cut, stop = min(found)
            text, finish = text[:cut], ("stop", stop)
        elif num_tokens == max_tokens:
            finish = ("length", None)
        elif len(ids) - len(script.prompt_ids) == len(script.pieces):
            finish = ("stop", None)
        if finish or len(new_ids) == tokens_per_event:
            end = len(text) if finish else max(len(text) - num_held, num_shown)
            yield text[num_shown:end], new_ids, finish
            num_shown, new_ids = end, []
        if finish:
            return


@dataclass
class ScriptedEngine:
    """How the engine of a `FakeServer` behaves.

    Each stream takes a number from `breaks`, which engines may share, and breaks after that number of events. While
    `hung_at` is a number, the core hangs: streams stall before their event of this number, other answers do not
    come. The HTTP server answers on, and `filler` is what it sends meanwhile, every 10 ms.
    """

    script: Script
    breaks: list[int] = field(default_factory=list)
    how: str = "reset"  # or "end", "error", "hang"
    tokens_per_event: int = 1
    num_broken: int = 0
    hung_at: int | None = None
    filler: bytes = b""
    delay_s: float = 0.0  # of each event
    has_plain_answers: bool = True  # else they get 404
    num_standing: int = 0  # streams that the hanging core holds up
    num_questions: int = 0  # requests for one token

    def answer(self, body: dict[str, Any], *, is_chat: bool) -> Response:
        if not body.get("stream"):
            self.num_questions += body.get("max_tokens") == 1
            if not self.has_plain_answers:
                return JSONResponse({"detail": "Not Found"}, 404)
            return StreamingResponse(self._whole(is_chat=is_chat), media_type="application/json")
        stream = events(self.script, body, is_chat=is_chat, tokens_per_event=self.tokens_per_event)
        return StreamingResponse(self._sent(stream), media_type="text/event-stream")

    async def _sent(self, stream: Iterator[bytes]) -> AsyncIterator[bytes]:
        break_after = self.breaks.pop(0) if self.breaks else None
        for index, raw in enumerate(stream):
            if index == break_after:
                self.num_broken += 1
                match self.how:
                    case "reset":
                        raise ConnectionResetError("the engine dies")
                    case "error":
                        error = b'data: {"error":{"message":"EngineCore died","code":500}}\n\n'
                        yield error + raw + b"data: [DONE]\n\n"  # what follows an error is not part of the answer
                    case "hang":
                        await asyncio.Event().wait()
                return
            async for filler in self._hang(index):
                yield filler
            yield raw
            await asyncio.sleep(self.delay_s)

    async def _hang(self, index: int) -> AsyncIterator[bytes]:
        if index != self.hung_at:
            return
        self.num_standing += 1
        try:
            while self.hung_at is not None:
                if self.filler:
                    yield self.filler
                await asyncio.sleep(0.01)
        finally:
            self.num_standing -= 1

    async def _whole(self, *, is_chat: bool) -> AsyncIterator[bytes]:
        while self.hung_at is not None:  # noqa: ASYNC110  tests set it from another thread
            await asyncio.sleep(0.01)
        text = self.script.decode(self.script.ids)
        said = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        usage = {"prompt_tokens": 3, "completion_tokens": len(self.script.pieces)}
        yield msgspec.json.encode({"choices": [said | {"index": 0, "finish_reason": "stop"}], "usage": usage})


def script_on(fake: FakeServer, script: Script, **behaviour: Any) -> ScriptedEngine:
    """Let the server answer with this script, like a vLLM that can give token ids."""
    engine = ScriptedEngine(script, **behaviour)
    fake.version = "0.32.0"
    fake.replies |= {
        "/v1/completions": lambda _, body: engine.answer(body, is_chat=False),
        "/v1/chat/completions": lambda _, body: engine.answer(body, is_chat=True),
        "/detokenize": lambda _, body: JSONResponse({"prompt": script.decode(body["tokens"])}),
    }
    return engine


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"

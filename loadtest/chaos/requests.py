"""The requests of a trial, and what a client gets for one."""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

Json = dict[str, Any]

NUM_REQUESTS = 24  # of a trial
HUNG_S = 120.0  # a stream without an event for this long
_NUM_LONG_WORDS = 1000
_TOKENS_OF_A_WORD = 8  # at most: a tokenizer may know nothing but bytes
_SAMPLING: tuple[tuple[str, Json], ...] = (
    ("greedy", {"temperature": 0}),
    ("seeded", {"temperature": 0.9, "top_p": 0.95}),
    ("penalised", {"temperature": 0.8, "frequency_penalty": 0.7, "repetition_penalty": 1.2, "min_tokens": 20}),
    ("stop strings", {"temperature": 1.0, "stop": ["the", "\n\n", " of "], "ignore_eos": False}),
    ("log probabilities", {"temperature": 0.7, "logprobs": 2}),
    ("two choices", {"temperature": 0.9, "n": 2}),
)
_WORDS = (
    "river stone cloud lamp garden winter engine paper signal market window forest silver north copy".split()  # noqa: SIM905
)
_SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 8},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "sizes", "is_open"],
    "additionalProperties": False,
}
_TOOL: Json = {
    "type": "function",
    "function": {"name": "find_place", "description": "Finds a place.", "parameters": _SCHEMA},
}


@dataclass(frozen=True, slots=True)
class ChaosRequest:
    """One request that is sent many times."""

    kind: str
    path: str
    body: Json


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client got, or the error that it saw."""

    content: object = None  # compared as a whole
    error: str = ""
    code: str = ""  # of the error, for programs
    is_cut_off: bool = False  # whether the error is that the connection broke
    longest_silence_s: float = 0.0


def sample_requests(seed: int, model: str, max_tokens: int, max_model_len: int = 2048) -> list[ChaosRequest]:
    """All kinds of sampling with short and long prompts, and what else a client may ask for."""
    source = random.Random(seed)
    requests = []
    for number, num_words in enumerate((8, 60, 250)):
        for kind, sampling in _SAMPLING:
            body = _body(model, max_tokens, number) | {"prompt": _words(source, num_words), "ignore_eos": True}
            requests.append(ChaosRequest(kind, "/v1/completions", body | sampling))
    for kind, path, body in _others(source, max(1, (max_model_len - max_tokens) // _TOKENS_OF_A_WORD)):
        requests.append(ChaosRequest(kind, path, _body(model, max_tokens, seed) | body))
    return requests


def _body(model: str, max_tokens: int, seed: int) -> Json:
    return {
        "model": model,
        "max_tokens": max_tokens,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _others(source: random.Random, max_words: int) -> Iterator[tuple[str, str, Json]]:
    """(kind, path, what is its own) of requests beside the plain ones."""
    completions, chat = "/v1/completions", "/v1/chat/completions"
    said = {"messages": [{"role": "user", "content": _words(source, 40)}], "temperature": 0.9}
    schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}}
    regex = {"structured_outputs": {"regex": r"([a-z]{2,9} [0-9]{2}, ){6}end"}, "n": 2, "temperature": 1.0}
    forced = {"type": "function", "function": {"name": "find_place"}}
    scored = {"echo": True, "logprobs": 1, "temperature": 0.8, "ignore_eos": True}
    long = {"temperature": 0.8, "ignore_eos": True}
    yield "regular expression", completions, {"prompt": _words(source, 30)} | regex
    yield "scored prompt", completions, {"prompt": _words(source, 90)} | scored
    yield "long prompt", completions, {"prompt": _words(source, min(max_words, _NUM_LONG_WORDS))} | long
    yield "chat", chat, said | {"logprobs": True, "presence_penalty": 0.5, "ignore_eos": True}
    yield "JSON schema", chat, said | {"response_format": schema}
    yield "tool call", chat, said | {"tools": [_TOOL], "tool_choice": forced}


def _words(source: random.Random, number: int) -> str:
    return " ".join(source.choices(_WORDS, k=number))


async def ask(client: httpx.AsyncClient, request: ChaosRequest) -> Answer:
    """Send one request and read its stream to the end."""
    read = _Reading()
    try:
        async with client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200:
                return _refusal(response.status_code, await response.aread())
            async for line in _lines(response):
                read.note_sound()
                if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                    read.take(json.loads(line[5:]))
                if read.error:
                    return _failure(read, str(read.error), str(read.error.get("code")))
    except (httpx.HTTPError, ValueError) as exc:
        failure = _failure(read, f"{type(exc).__name__}: {exc}", type(exc).__name__)
        return replace(failure, is_cut_off=isinstance(exc, httpx.NetworkError | httpx.RemoteProtocolError))
    if not read.has_ended(request.body.get("n", 1)):
        return _failure(read, f"the stream ended without an end of its choices: {read.reasons}", "no_end")
    return Answer(read.content(), longest_silence_s=read.longest_silence_s)


def chaos_client(url: str) -> httpx.AsyncClient:
    """A client whose streams may be silent for a while, but not forever. No connection outlives its request."""
    timeout = httpx.Timeout(HUNG_S, connect=10.0)
    limits = httpx.Limits(max_keepalive_connections=0)  # the next request may meet another router process
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a stream. httpx ends a line at any character that Unicode calls an end of one, inside of a text too."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _refusal(status: int, body: bytes) -> Answer:
    try:
        code = str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        code = str(status)
    return Answer(error=f"HTTP {status}: {body[:300].decode(errors='replace')}", code=code)


def _failure(read: _Reading, error: str, code: str) -> Answer:
    return Answer(error=error, code=code, longest_silence_s=read.longest_silence_s)


@dataclass(slots=True)
class _Reading:
    """A stream as far as it has come. How its text is divided into events does not count."""

    texts: dict[str, str] = field(default_factory=dict)  # by choice and part, such as a tool call's arguments
    reasons: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[object, object]]] = field(default_factory=dict)  # (token, number) by choice
    usage: Json = field(default_factory=dict)
    error: Json = field(default_factory=dict)
    longest_silence_s: float = 0.0
    heard_s: float = field(default_factory=time.monotonic)

    def note_sound(self) -> None:
        now_s = time.monotonic()
        self.longest_silence_s, self.heard_s = max(self.longest_silence_s, now_s - self.heard_s), now_s

    def take(self, event: Json) -> None:
        self.error = event.get("error") or {}
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", []):
            index = choice["index"]
            for part, text in _texts(choice):
                self.texts[f"{index} {part}"] = self.texts.get(f"{index} {part}", "") + text
            self.reasons[index] = choice.get("finish_reason") or self.reasons.get(index, "")
            self.logprobs.setdefault(index, []).extend(_logprobs(choice.get("logprobs") or {}))

    def has_ended(self, num_choices: int) -> bool:
        return len(self.reasons) == num_choices and all(self.reasons.values())

    def content(self) -> str:
        counts = [self.usage.get(name) for name in ("prompt_tokens", "completion_tokens")]
        texts = sorted((part, text) for part, text in self.texts.items() if text)
        return json.dumps([texts, sorted(self.reasons.items()), sorted(self.logprobs.items()), counts])


def _texts(choice: Json) -> Iterator[tuple[str, str]]:
    """(part, more text of it) of an event of a text completion or of a chat."""
    delta = choice.get("delta") or {"content": choice.get("text")}
    for name in ("content", "reasoning_content"):
        yield name, delta.get(name) or ""
    for call in delta.get("tool_calls") or []:
        for name in ("name", "arguments"):
            yield f"call {call['index']} {name}", call["function"].get(name) or ""


def _logprobs(scores: Json) -> list[tuple[object, object]]:
    """(token, number) of an event of a text completion or of a chat."""
    if "content" in scores:
        return [(one["token"], one["logprob"]) for one in scores["content"] or []]
    return list(zip(scores.get("tokens", []), scores.get("token_logprobs", []), strict=True))

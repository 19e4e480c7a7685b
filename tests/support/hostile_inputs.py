"""Inputs of hostile or broken clients, as the bytes of whole HTTP requests. The same seed gives the same inputs.

Every input has a name, `group/what`, by which a result is told. Nothing here opens a connection.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, product

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_MEGABYTE = 1_000_000
_PROMPT = "a " * 40

_POST = f"POST {COMPLETIONS} HTTP/1.1\r\n"
_HOST, _JSON = "Host: localhost\r\n", "Content-Type: application/json\r\n"
_TWO_BYTES = "Content-Length: 2\r\nConnection: close\r\n\r\n{}"


class Manner(Enum):
    """The way in which the bytes are sent."""

    WHOLE = "whole"
    SLOW = "slow"  # one byte at a time, for as long as the server lets us
    LEAVE = "leave"  # close the connection right after sending
    RESET = "reset"  # abort it, after the first bytes of the answer
    HALF_CLOSE = "half-close"  # send no more, and read the answer
    SILENT = "silent"  # send it and wait; the rest never comes


@dataclass(frozen=True, slots=True)
class HostileInput:
    """The input of one connection. A heavy one is sent alone, so that a stall has one cause."""

    name: str
    data: bytes
    manner: Manner = Manner.WHOLE
    is_heavy: bool = False


def request(path: str, body: bytes | object, *headers: str, method: str = "POST") -> bytes:
    """A request with this body, JSON unless it is bytes already; the server closes the connection behind its answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Content-Length: {len(data)}"]
    if not any(header.lower().startswith("content-type:") for header in headers):
        head.append("Content-Type: application/json")
    return "\r\n".join([*head, *headers, "", ""]).encode("latin-1") + data


def hostile_inputs(model: str, seed: int = 0) -> Iterator[HostileInput]:
    """All inputs, in a fixed order. They are made as they are asked for: together they are half a gigabyte."""
    rng = random.Random(f"hostile/{seed}")
    return chain(
        _sampling_values(model), _sampling_mixes(model, rng), _field_types(model), _other_routes(model),
        _nesting(model), _multipliers(model), _large_bodies(model), _http(), _departures(model), _damaged(model, rng),
    )  # fmt: skip


# Written as text, because some is not JSON: Python's NaN and Infinity, numbers beyond any type.
_NUMBERS = (
    "0", "-0.0", "1", "-1", "2", "0.5", "1e-40", "1e-320", "1e-9", "1e9", "1e38", "1e300", "1e308", "-1e308", "1e400",
    "NaN", "Infinity", "-Infinity", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808",
    "1" + "0" * 400, "true", "null", '"1"', "[]", "{}",
)  # fmt: skip
_NUMERIC_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed",
    "n", "max_tokens", "min_tokens", "logprobs", "priority",
)  # fmt: skip


def _fields(path: str, model: str) -> dict[str, object]:
    prompt = {"messages": [{"role": "user", "content": _PROMPT}]} if path == CHAT else {"prompt": _PROMPT}
    return {"model": model, "max_tokens": 4, **prompt}


def _with(path: str, model: str, name: str, value: str) -> bytes:
    """A body with one field given as text."""
    fields = {key: field for key, field in _fields(path, model).items() if key != name}
    return (json.dumps(fields)[:-1] + f', "{name}": {value}}}').encode("utf-8", "surrogatepass")


def _sampling_values(model: str) -> Iterator[HostileInput]:
    for field, value in product(_NUMERIC_FIELDS, _NUMBERS):
        yield HostileInput(f"value/{field}={value[:24]}", request(COMPLETIONS, _with(COMPLETIONS, model, field, value)))
    for field, value in product(("top_logprobs", "max_completion_tokens", "n"), _NUMBERS):
        yield HostileInput(f"value/chat {field}={value[:24]}", request(CHAT, _with(CHAT, model, field, value)))


_EXTREMES: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1e-40, 1e-6, 1.0, 2.0),
    "top_p": (0, 1e-40, 1e-6, 0.5, 1.0),
    "top_k": (-1, 0, 1, 2, 2**31 - 1),
    "min_p": (0, 1e-40, 0.5, 1.0),
    "repetition_penalty": (1e-40, 1e-6, 1.0, 1e6, 1e38),
    "frequency_penalty": (-2, 0, 2),
    "presence_penalty": (-2, 0, 2),
    "logprobs": (None, 0, 5, 20),
    "min_tokens": (0, 1, 4),
    "ignore_eos": (True, False),
    "logit_bias": ({}, {"5": -100}, {str(idx): -100 for idx in range(300)}, {str(idx): 100 for idx in range(300)}),
    "stop_token_ids": ([], list(range(300))),
    "seed": (None, 0, -1, 2**63 - 1),
    "n": (1, 2, 5),
    "stream": (True, False),
}


def _sampling_mixes(model: str, rng: random.Random) -> Iterator[HostileInput]:
    """Extreme values of several fields together: each may be survivable alone."""
    yield HostileInput(
        "mix/inf logit and min_p",
        request(COMPLETIONS, {**_fields(COMPLETIONS, model), "repetition_penalty": 1e-40, "min_p": 0.5}),
    )
    for idx in range(250):
        chosen = rng.sample(sorted(_EXTREMES), rng.randint(2, len(_EXTREMES)))
        extremes = {name: rng.choice(_EXTREMES[name]) for name in chosen}
        yield HostileInput(f"mix/{idx}", request(COMPLETIONS, {**_fields(COMPLETIONS, model), **extremes}))


_ANYTHING = ("null", "true", "-1", "1e308", '""', '"\\u0000"', '"\\ud800"', "[]", "[[]]", "[null]", "{}", '{"a": 1}')


def _field_types(model: str) -> Iterator[HostileInput]:
    text_fields = (
        "prompt", "stop", "stop_token_ids", "logit_bias", "stream", "stream_options", "echo", "user", "cache_salt",
        "conversation_id", "response_format", "tools", "tool_choice", "metadata", "suffix", "best_of", "model",
        "kv_transfer_params", "guided_json", "skip_special_tokens",
    )  # fmt: skip
    for field, value in product(text_fields, _ANYTHING):
        yield HostileInput(f"type/{field}={value}", request(COMPLETIONS, _with(COMPLETIONS, model, field, value)))
    for field, value in product(("messages", "chat_template_kwargs", "tool_choice"), _ANYTHING):
        yield HostileInput(f"type/chat {field}={value}", request(CHAT, _with(CHAT, model, field, value)))
    for field, value in product(("role", "content", "name", "tool_calls", "tool_call_id"), _ANYTHING):
        message = f'[{{"role": "user", "content": "x", "{field}": {value}}}]'
        yield HostileInput(f"type/message {field}={value}", request(CHAT, _with(CHAT, model, "messages", message)))


def _other_routes(model: str) -> Iterator[HostileInput]:
    bodies: Sequence[object] = (
        b"", b"null", b"[]", b"{}", b'"x"', b"\xff\xfe", b"{" * 5000, {"prompt": "x" * 100_000},
        {"id": "x" * 100_000}, {"model": model, "tokens": [2**62]}, {"model": model, "tokens": [-1]},
        {"model": model, "tokens": [5] * 200_000},
        {"model": model, "prompt": "x", "ttl_s": 1e308}, {"model": model, "prompt": "x", "ttl_s": -1},
        {"model": model, "messages": []}, {"conversation_id": "x" * 100_000}, {"model": "x" * 100_000, "prompt": "x"},
    )  # fmt: skip
    posts = (
        "/tokenize", "/detokenize", "/v1/cache/pin", "/v1/cache/unpin", "/v1/cache/prefetch", "/v1/route/explain",
        CHAT, COMPLETIONS, "/v1/pools/check", "/v1/responses", "/v1/embeddings",
    )  # fmt: skip
    for path, (idx, body) in product(posts, enumerate(bodies)):
        yield HostileInput(f"route/{path} body {idx}", request(path, body))
    gets = (
        "/", "/health", "/ready", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/pools", "/v1/cache/pins",
        "/v1/models/" + "x" * 5000, "/v1/models/%00", "/v1/models/..%2f..%2fetc%2fpasswd", "/../../etc/passwd", "//",
        "/%", "/v1/pools?" + "a=b&" * 1000, "/metrics?name[]=" + "x" * 5000, "/v1//models", "/v1/models/?q=\x7f",
    )  # fmt: skip
    for path, method in product(gets, ("GET", "HEAD", "OPTIONS", "DELETE", "PUT", "TRACE")):
        yield HostileInput(f"route/{method} {path[:30]}", request(path, b"", method=method))


def _deep(depth: int, opening: str, closing: str) -> str:
    return opening * depth + "1" + closing * depth


def _nesting(model: str) -> Iterator[HostileInput]:
    for depth, (opening, closing) in product((50, 400, 1_000, 20_000, 400_000), (("[", "]"), ('{"a":', "}"))):
        deep = _deep(depth, opening, closing)
        for field in ("prompt", "tools", "metadata", "response_format", "unknown", "logit_bias", "stop"):
            body = _with(COMPLETIONS, model, field, deep)
            yield HostileInput(f"deep/{field} {opening}x{depth}", request(COMPLETIONS, body), is_heavy=depth > 20_000)
        message = f'[{{"role": "user", "content": {deep}}}]'
        calls = f'[{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {deep}}}}}]}}]'
        text = json.dumps(deep)
        texts = f'[{{"role": "assistant", "tool_calls": [{{"function": {{"name": "f", "arguments": {text}}}}}]}}]'
        for what, field, value in (
            ("content", "messages", message),
            ("arguments", "messages", calls),
            ("arguments as text", "messages", texts),
            ("template kwargs", "chat_template_kwargs", f'{{"a": {deep}}}'),
        ):
            body = _with(CHAT, model, field, value)
            yield HostileInput(f"deep/chat {what} {opening}x{depth}", request(CHAT, body), is_heavy=depth > 20_000)


def _multipliers(model: str) -> Iterator[HostileInput]:
    """Numbers that are each allowed, but whose product is too large."""
    fields = _fields(COMPLETIONS, model)
    stops = ["x" * 4_000 + str(idx) for idx in range(1_024)]
    cases: dict[str, dict[str, object]] = {
        "prompts, n and stops": {"prompt": ["a"] * 16, "n": 128, "stop": stops, "max_tokens": 16},
        "n and stops": {"n": 128, "stop": stops, "max_tokens": 64},
        "stops that share a beginning": {"stop": ["a" * idx for idx in range(1, 500)], "max_tokens": 200},
        "stops": {"stop": stops, "max_tokens": 200, "ignore_eos": True},
        "prompts": {"prompt": ["a"] * 2_048},
        "too many prompts": {"prompt": ["a"] * 100_000},
        "prompts of tokens": {"prompt": [[5] * 100] * 2_000},
        "empty prompts": {"prompt": [""] * 5_000},
        "n": {"n": 128},
        "n and logprobs": {"n": 128, "logprobs": 20, "max_tokens": 32, "ignore_eos": True},
        "logit_bias": {"logit_bias": {str(idx): 1 for idx in range(300)}, "prompt": ["a"] * 512},
        "much logit_bias": {"logit_bias": {str(idx): 1 for idx in range(200_000)}},
        "stop_token_ids": {"stop_token_ids": list(range(200_000))},
        "stop of one long string": {"stop": "x" * 4_000_000},
        "stops, no room": {"stop": ["x"] * 500_000},
        "user": {"user": "x" * 4_000_000},
        "unknown fields": {f"f{idx}": idx for idx in range(200_000)},
    }
    for name, case in cases.items():
        yield HostileInput(f"product/{name}", request(COMPLETIONS, {**fields, **case}), is_heavy=True)
    chat = _fields(CHAT, model)
    messages: dict[str, list[dict[str, object]]] = {
        "messages": [{"role": "user", "content": "x"}] * 100_000,
        "empty messages": [{"role": "user", "content": ""}] * 200_000,
        "parts": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}],
        "roles": [{"role": "x" * 1_000_000, "content": "x"}],
        "calls": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 50_000}],
    }
    for name, case_messages in messages.items():
        yield HostileInput(f"product/chat {name}", request(CHAT, {**chat, "messages": case_messages}), is_heavy=True)


def _large_bodies(model: str) -> Iterator[HostileInput]:
    pieces = {
        "a": "a", "word": "word ", "space": " ", "newline": "\n", "tab": "\t", "digits": "0123456789",
        "punctuation": "!?.,;:-", "emoji": "\U0001f600", "joined emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467",
        "marks": "e\u0301\u0302\u0303", "cjk": "\u4f60\u597d", "special": "<|im_start|>", "half special": "<|im_",
        "control": "\u0001", "replacement": "\ufffd", "camel": "aBcD", "apostrophes": "'s't're",
    }  # fmt: skip
    for (name, piece), size in product(pieces.items(), (100_000, _MEGABYTE, 7_900_000)):
        count = size // max(1, len(json.dumps(piece)) - 2 if piece.isascii() else len(json.dumps(piece)))
        for path in (COMPLETIONS, CHAT) if size > _MEGABYTE else (COMPLETIONS,):
            fields = _fields(path, model)
            text = piece * count
            given = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
            yield HostileInput(f"large/{name} {size} {path[4:8]}", request(path, {**fields, **given}), is_heavy=True)
    for count in (10_000, 1_000_000, 2_500_000):
        body = {**_fields(COMPLETIONS, model), "prompt": [5] * count}
        yield HostileInput(f"large/{count} token ids", request(COMPLETIONS, body), is_heavy=True)
    for path in ("/tokenize", "/v1/cache/pin", "/v1/route/explain"):
        body = {"model": model, "prompt": "a b " * 1_900_000}
        yield HostileInput(f"large/{path}", request(path, body), is_heavy=True)
    body = {"model": model, "tokens": [5] * 2_500_000}
    yield HostileInput("large/detokenize", request("/detokenize", body), is_heavy=True)
    yield HostileInput("large/over the limit", request(COMPLETIONS, b" " * 20_000_000), is_heavy=True)


def _http() -> Iterator[HostileInput]:
    """Malformed HTTP."""
    heads = _request_lines() | _headers() | _lengths_and_chunks() | _unserved_features()
    for name, head in heads.items():
        yield HostileInput(f"http/{name}", head.encode("latin-1"), Manner.HALF_CLOSE, is_heavy=len(head) > 50_000)
    for name, head in heads.items():
        if name in ("nothing", "one byte", "garbage", "huge length", "huge chunk", "tls", "websocket", "h2c"):
            yield HostileInput(f"http/{name}, and silence", head.encode("latin-1"), Manner.SILENT)
    yield HostileInput("http/slow head", (_POST + _HOST + "X: y\r\n" * 1_000).encode(), Manner.SLOW)
    yield HostileInput("http/slow body", request(COMPLETIONS, b" " * 1_000), Manner.SLOW)


def _request_lines() -> dict[str, str]:
    return {
        "nothing": "",
        "one byte": "G",
        "garbage": "\x00\x01\x02\x03" * 1_000,
        "tls": "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + "\x00" * 500,
        "http2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "http 0.9": "GET /health\r\n\r\n",
        "http 9.9": "GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n",
        "absolute url": "GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "connect": "CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        "asterisk": "OPTIONS * HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "unknown method": "BREW /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "long method": "G" * 100_000 + " /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "long url": "GET /" + "a" * 1_000_000 + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "bare newline": "GET /health HTTP/1.1\nHost: localhost\nConnection: close\n\n",
    }  # fmt: skip


def _headers() -> dict[str, str]:
    return {
        "no host": "GET /health HTTP/1.1\r\nConnection: close\r\n\r\n",
        "two hosts": "GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: close\r\n\r\n",
        "foreign host": "GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        "many headers": "GET /health HTTP/1.1\r\n" + "X: y\r\n" * 100_000 + _HOST + "Connection: close\r\n\r\n",
        "long header": "GET /health HTTP/1.1\r\nX: " + "y" * 2_000_000 + "\r\n" + _HOST + "Connection: close\r\n\r\n",
        "long header name": "GET /health HTTP/1.1\r\n" + "y" * 200_000 + ": x\r\n" + _HOST + "\r\n",
        "folded": "GET /health HTTP/1.1\r\nHost: localhost\r\n folded\r\nConnection: close\r\n\r\n",
        "nul in header": "GET /health HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\nConnection: close\r\n\r\n",
        "latin header": "GET /health HTTP/1.1\r\nHost: localhost\r\nX: \xff\xfe\r\nConnection: close\r\n\r\n",
        "expect nonsense": _POST + _HOST + _JSON + "Expect: a miracle\r\n" + _TWO_BYTES,
        "no type": _POST + _HOST + _TWO_BYTES,
        "form": _POST + _HOST + "Content-Type: text/plain\r\n" + _TWO_BYTES,
        "foreign origin": _POST + _HOST + _JSON + "Origin: https://evil.example\r\n" + _TWO_BYTES,
        "range": "GET /health HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-18446744073709551615\r\n"
        "Connection: close\r\n\r\n",
        "many keys": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + "Authorization: Bearer x\r\n" * 90
        + "Connection: close\r\n\r\n",
        "long key": "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + "x" * 30_000
        + "\r\nConnection: close\r\n\r\n",
    }  # fmt: skip


def _lengths_and_chunks() -> dict[str, str]:
    return {
        "negative length": _POST + _HOST + _JSON + "Content-Length: -1\r\n\r\n{}",
        "huge length": _POST + _HOST + _JSON + "Content-Length: 99999999999999999999\r\n\r\n{}",
        "length of words": _POST + _HOST + _JSON + "Content-Length: many\r\n\r\n{}",
        "two lengths": _POST + _HOST + _JSON + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
        "length and chunks": _POST + _HOST + "Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "bad chunk": _POST + _HOST + _JSON + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "huge chunk": _POST + _HOST + _JSON + "Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
        "chunk extension": _POST + _HOST + "Transfer-Encoding: chunked\r\n\r\n2;" + "x" * 500_000
        + "\r\n{}\r\n0\r\n\r\n",
        "trailers": _POST + _HOST + "Transfer-Encoding: chunked\r\n\r\n0\r\n" + "T: x\r\n" * 50_000 + "\r\n",
        "unknown coding": _POST + _HOST + _JSON + "Transfer-Encoding: gzip\r\nConnection: close\r\n\r\n{}",
    }  # fmt: skip


def _unserved_features() -> dict[str, str]:
    return {
        "compressed": _POST + _HOST + _JSON + "Content-Encoding: gzip\r\n" + _TWO_BYTES,
        "websocket": _POST + _HOST + _JSON + "Connection: Upgrade, close\r\nUpgrade: websocket\r\n"
        "Content-Length: 2\r\n\r\n{}",
        "websocket get": "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        "h2c": "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\n\r\n",
        "expect": _POST + _HOST + _JSON + "Expect: 100-continue\r\n" + _TWO_BYTES,
        "pipelined": ("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2_000)
        + "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    }  # fmt: skip


def _departures(model: str) -> Iterator[HostileInput]:
    for manner, stream, n in product((Manner.LEAVE, Manner.RESET, Manner.HALF_CLOSE), (True, False), (1, 4)):
        for max_tokens in (1, 50, 500):
            body = {
                **_fields(COMPLETIONS, model), "stream": stream, "n": n, "max_tokens": max_tokens, "ignore_eos": True,
            }  # fmt: skip
            name = f"leave/{manner.value} {'stream' if stream else 'plain'} n={n} {max_tokens} tokens"
            yield HostileInput(name, request(COMPLETIONS, body), manner)


def _damaged(model: str, rng: random.Random) -> Iterator[HostileInput]:
    """Good requests with a few bytes changed, cut out or doubled."""
    for idx in range(200):
        path = rng.choice((CHAT, COMPLETIONS))
        whole = bytearray(
            request(path, {**_fields(path, model), "stream": rng.random() < 0.5, "stop": ["x"], "seed": 1})
        )
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(whole))
            what = rng.randrange(3)
            if what == 0:
                whole[at] = rng.randrange(256)
            elif what == 1:
                del whole[at : at + rng.randint(1, 8)]
            else:
                whole[at:at] = whole[at : at + rng.randint(1, 64)]
        yield HostileInput(f"damaged/{idx}", bytes(whole), Manner.HALF_CLOSE)


def describe(names: Sequence[str]) -> dict[str, int]:
    """Number of inputs by group."""
    counts: dict[str, int] = {}
    for name in names:
        group = name.partition("/")[0]
        counts[group] = counts.get(group, 0) + 1
    return counts

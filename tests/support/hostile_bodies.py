"""Bodies that a hostile or broken client may send over HTTP. The same seed gives the same ones."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

_BODY_BYTES = 8 * 1024 * 1024 - 2048  # as large as a body may be

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE, EXPLAIN = "/tokenize", "/detokenize", "/v1/route/explain"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
PIN, UNPIN, PREFETCH = "/v1/cache/pin", "/v1/cache/unpin", "/v1/cache/prefetch"

_USER = {"role": "user", "content": "Hello"}
_BASES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 2, "stream": True},
    CHAT: {"messages": [_USER], "max_tokens": 2, "stream": True},
    MESSAGES: {"messages": [_USER], "max_tokens": 2, "stream": True},
    COUNT_TOKENS: {"messages": [_USER]},
    RESPONSES: {"input": "Hello", "max_output_tokens": 2, "stream": True},
    EXPLAIN: {"prompt": "Hello", "max_tokens": 2},
    TOKENIZE: {"prompt": "Hello"},
    DETOKENIZE: {"tokens": [1, 2]},
    PIN: {"prompt": "Hello"},
    UNPIN: {"id": "pin"},
    PREFETCH: {"id": "pin"},
}
_SAMPLING = [
    *("n", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "stop_token_ids", "skip_special_tokens"),
    *("add_special_tokens", "cache_salt", "conversation_id", "priority", "logprobs", "stream", "stream_options"),
    *("max_tokens", "model", "user", "tools", "response_format", "suffix", "best_of", "unknown"),
]
_TEMPLATE = ["messages", "add_generation_prompt", "chat_template_kwargs", "tool_choice"]
_MESSAGE_PROMPT = [
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"),
    *("cache_salt", "container", "context_management", "mcp_servers", "output_format", "metadata"),
]
_FIELDS: dict[str, list[str]] = {
    COMPLETIONS: ["prompt", "echo", *_SAMPLING],
    CHAT: [*_TEMPLATE, "top_logprobs", "max_completion_tokens", *_SAMPLING],
    MESSAGES: [
        *_MESSAGE_PROMPT,
        *("max_tokens", "stream", "stop_sequences", "temperature", "top_p", "top_k", "seed", "priority"),
    ],
    COUNT_TOKENS: _MESSAGE_PROMPT,
    RESPONSES: [
        *("input", "instructions", "max_output_tokens", "previous_response_id", "store", "stream", "text", "tools"),
        *("tool_choice", "temperature", "top_p", "top_logprobs", "include", "metadata", "reasoning", "truncation"),
    ],
    EXPLAIN: ["prompt", "messages", "n", "stop"],
    TOKENIZE: ["prompt", *_TEMPLATE, "return_token_strs"],
    DETOKENIZE: ["tokens"],
    PIN: ["prompt", *_TEMPLATE, "conversation_id", "ttl_s", "prefetch", "cache_salt"],
    UNPIN: ["id"],
    PREFETCH: ["id", "to"],
}
# As JSON: some of these no encoder of JSON would make.
_VALUES = [
    *("null", "true", "false", "0", "-1", "1", "2", "1e-40", "-1e-40", "0.5", "-0.0", "1e308", "1e999", "NaN"),
    "Infinity",
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "4294967296", "-9223372036854775809"),
    *("9" * 400, "0." + "9" * 400, '""', '" "', '"\\u0000"', '"\\ud800"', '"\\ud83c\\udf89"', '"\\u202e\\ufeff"'),
    *('"<|im_end|>"', '"{{ messages }}{% for x in range(10**9) %}x{% endfor %}"', json.dumps("x" * 5000)),
    *("[]", "[[]]", "{}", '[""]', "[null]", "[0]", "[-1]", "[1e3]", '["a", 1]', "[[1], [2]]", "[18446744073709551616]"),
    *('{"": 1}', '{"a": 1}', '{"-1": 1}', '{"0": 100}', '{"0": 1e999}', '{"99999999999": 1}', '{"00": 1, "0": 2}'),
    *('{"type": "json_schema"}', '{"role": "user"}', '[{"role": "user", "content": null}]', '[{"role": "x"}]'),
    '[{"role": "user", "content": [{"type": "image_url"}]}]',
    '[{"role": "user", "content": [{"type": "text"}]}]',
    '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]',
    '[{"role": "tool", "content": "", "tool_call_id": ""}]',
    '[{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "", "content": [{"type": "tool_result"}]}]}]',
    '[{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "", "input": {}}]}]',
    '[{"name": "f", "input_schema": {"a": [1e999]}}]',
    '{"type": "tool", "name": "f"}',
    '{"format": {"type": "json_schema", "schema": 1}}',
    "[" * 900 + "]" * 900,
    '{"a":' * 900 + "1" + "}" * 900,
    "[" * 100_000,
]


class Input(NamedTuple):
    """One request."""

    name: str
    path: str
    body: bytes


def small_inputs(seed: int) -> Iterator[Input]:
    """Each field with each value; pairs of them; and bodies that are not even JSON. Over 5,000."""
    for path, names in _FIELDS.items():
        for name, value in itertools.product(names, _VALUES):
            yield Input(f"{name}={value[:40]}", path, _body(path, {name: value}))
    rng = random.Random(seed)
    for _ in range(500):
        path = rng.choice([COMPLETIONS, CHAT])
        fields = {name: rng.choice(_VALUES) for name in rng.sample(_FIELDS[path], 3)}
        yield Input(" ".join(fields), path, _body(path, fields))
    for path, base in _BASES.items():
        whole = json.dumps(base).encode()
        for body in (
            *(b"", b"{", b"[]", b'"', b"null", b"\x00" * 100, b"\xff\xfe", whole[:-1], whole + b"x", b" " * 10_000),
        ):
            yield Input(f"body {body[:20]!r}", path, body)


def large_inputs() -> Iterator[Input]:
    """Bodies near the largest size whose parts are legal or would cost much to refuse."""
    size = _BODY_BYTES
    texts = {
        "words": "hello world foo ",
        "a": "a",
        "spaces": " ",
        "lines": "\n",
        "special": "<|im_end|>",
        "<": "<",
        "digits": "0123456789",
        "cjk": "日",
        "emoji": "🎉",
        "marks": "a\u0301\u0327",
        "control characters": "\x00\x04",
    }
    for name, part in texts.items():
        text = part * (size // max(len(part.encode()), len(json.dumps(part)) - 2))
        quoted = json.dumps(text, ensure_ascii=False)
        yield Input(f"text of {name}", COMPLETIONS, f'{{"prompt":{quoted}}}'.encode())
        yield Input(f"chat of {name}", CHAT, f'{{"messages":[{{"role":"user","content":{quoted}}}]}}'.encode())
    quoted = json.dumps("hello world foo " * (size // 16))
    for path in (TOKENIZE, PIN, EXPLAIN):
        yield Input("text", path, f'{{"prompt":{quoted}}}'.encode())
    yield Input("escapes", COMPLETIONS, b'{"prompt":"' + b"\\u0041" * (size // 6) + b'"}')
    for path, field in ((COMPLETIONS, b"prompt"), (DETOKENIZE, b"tokens"), (PIN, b"prompt"), (EXPLAIN, b"prompt")):
        yield Input("ids", path, b'{"%b":[%b]}' % (field, _many(b"1", size)))
    for item in (b"[1]", b"[]", b'""', b'"a"', b"[1],1"):
        yield Input(f"prompts {item.decode()}", COMPLETIONS, b'{"prompt":[%b]}' % _many(item, size))
    message = b'{"role":"user","content":""}'
    yield Input("messages", CHAT, b'{"messages":[%b]}' % _many(message, size))
    yield Input("messages at the limit", CHAT, b'{"messages":[%b]}' % _many(message, 16_000 * len(message)))
    text_part = b'{"type":"text","text":""}'
    yield Input("parts", CHAT, b'{"messages":[{"role":"user","content":[%b]}]}' % _many(text_part, size))
    block = b'{"max_tokens":1,"messages":[{"role":"user","content":[%b]},{"role":"user","content":"a"}]}'
    results = b'{"type":"tool_result","tool_use_id":""}'
    for item in (text_part, results, b'{"type":"text"}'):
        yield Input(f"blocks {item.decode()}", MESSAGES, block % _many(item, size))
        yield Input(f"blocks {item.decode()}", COUNT_TOKENS, block % _many(item, size))
    calls = _many(b'{"type":"tool_use","id":"","name":"f","input":{}}', size)
    yield Input("calls", MESSAGES, block.replace(b"user", b"assistant", 1) % calls)
    items = {
        "calls": b'{"type":"function_call","call_id":"","name":"f","arguments":""}',
        "outputs": b'{"type":"function_call_output","call_id":"","output":""}',
        "reasoning": b'{"type":"reasoning"}',
        "messages": message,
        "parts": b'{"role":"user","content":[%b]}' % _many(text_part, size - 100),
    }
    for name, item in items.items():
        yield Input(f"items: {name}", RESPONSES, b'{"max_output_tokens":1,"input":[%b]}' % _many(item, size))
    many_calls = _many(items["calls"], 65_000 * (len(items["calls"]) + 1))
    yield Input("items: calls at the limit", RESPONSES, b'{"max_output_tokens":1,"input":[%b]}' % many_calls)
    nested = b'{"type":"tool_result","tool_use_id":"","content":['
    yield Input("results in results", MESSAGES, block % (nested * 900 + b"]}" * 900))
    yield Input(
        "system", MESSAGES, b'{"max_tokens":1,"messages":[%b],"system":[%b]}' % (message, _many(text_part, size))
    )
    yield Input(
        "tools", MESSAGES, b'{"max_tokens":1,"messages":[%b],"tools":[%b]}' % (message, _many(b'{"name":""}', size))
    )
    calling = b'{"messages":[{"role":"assistant","content":"","tool_calls":[%b]}]}'
    for call in (b"{}", b'{"function":{"arguments":"{}"}}'):
        yield Input("tool calls", CHAT, calling % _many(call, size))
    for inner in (b"1", b"[]"):
        arguments_text = json.dumps("[" + _many(inner, size).decode() + "]").encode()
        yield Input(
            f"arguments of {inner.decode()}",
            CHAT,
            calling % b'{"function":{"name":"f","arguments":%b}}' % arguments_text,
        )
        options = b'{"a":[%b]}' % _many(inner, size)
        yield Input("options", CHAT, b'{"messages":[%b],"max_tokens":1,"chat_template_kwargs":%b}' % (message, options))
    keys = b",".join(b'"k%d":1' % i for i in range(550_000))
    yield Input("options", CHAT, b'{"messages":[%b],"chat_template_kwargs":{%b}}' % (message, keys))
    yield Input("fields", COMPLETIONS, b'{"prompt":"a","max_tokens":1,%b}' % keys)
    yield Input("unknown", COMPLETIONS, b'{"prompt":"a","max_tokens":1,"unknown":[%b]}' % _many(b"[]", size))
    yield Input("tools", COMPLETIONS, b'{"prompt":"a","tools":[%b]}' % _many(b"[]", size))
    yield Input("stop ids", COMPLETIONS, b'{"prompt":"a","stop_token_ids":[%b]}' % _many(b"1", size))
    yield Input("number", COMPLETIONS, b'{"prompt":"a","max_tokens":1,"unknown":%b}' % (b"9" * size))
    yield Input("number", COMPLETIONS, b'{"prompt":"a","seed":%b}' % (b"9" * size))
    yield Input("depth", COMPLETIONS, b'{"prompt":"a","unknown":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}")
    for name in ("model", "cache_salt", "conversation_id", "user", "stop"):
        yield Input(
            f"long {name}", COMPLETIONS, b'{"prompt":"a","max_tokens":1,"%b":"%b"}' % (name.encode(), b"x" * size)
        )
    yield Input("long id", UNPIN, b'{"id":"%b"}' % (b"x" * size))
    yield Input("long role", CHAT, b'{"messages":[{"role":"%b","content":""}]}' % (b"x" * size))
    sixteen: dict[str, Any] = {"prompt": ["a"] * 16, "n": 128, "max_tokens": 2}
    stops = [chr(0x4E00 + i) + "x" * 3999 for i in range(500)]
    bias = {str(i): 1 for i in range(49_000)}
    alike = ["a" * 12 + f"{i:04d}" for i in range(1024)]
    for fields in (
        {"stop": stops},
        {"stop": alike},
        {"logit_bias": bias},
        {"logprobs": 20},
        {"stop": [" a" * 2048] * 4},
    ):
        yield Input(f"sequences with {next(iter(fields))}", COMPLETIONS, json.dumps(sixteen | fields).encode())
    echoing = {"prompt": ["a" * 60_000] * 16, "n": 128, "echo": True, "max_tokens": 1}
    yield Input("sequences with echo", COMPLETIONS, json.dumps(echoing).encode())


def _many(item: bytes, num_bytes: int) -> bytes:
    return b",".join([item] * ((num_bytes - 200) // (len(item) + 1)))


def _body(path: str, fields: dict[str, str]) -> bytes:
    """The path's base with these fields, whose values are JSON."""
    parts = {name: json.dumps(value) for name, value in _BASES[path].items()} | fields
    return ("{" + ",".join(f'"{name}":{value}' for name, value in parts.items()) + "}").encode()

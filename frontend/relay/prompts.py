"""The prompt of a request as tokens, by which it is placed.

With the model's tokenizer these are the tokens that the engine computes, so they match its KV events. Without one, four
bytes of text stand for one token: good enough for lengths, and texts with a common prefix get tokens with a common
prefix. The same holds for prompts with images, audio or video, whose tokens only the engine knows.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from typing import Any, NamedTuple

import msgspec

from tandem.frontend.http.json_body import decode_body
from tandem.frontend.http.wrong_value import shown
from tandem.frontend.openai.chat import template_messages, template_options
from tandem.frontend.openai.request_limits import check_messages
from tandem.frontend.openai.schema import ChatRequest, check_cache_salt
from tandem.frontend.relay.prompt_forms import PromptForm
from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import ConfigError, RequestError
from tandem.text.token_lengths import PromptLimit
from tandem.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 4
MEDIA_TOKENS = 512  # guess for an image and the like: between 256 for small models and thousands for large images
# A tuple, because a client's type may be anything, including values that cannot be in a set.
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking", "tool_use", "redacted_thinking")


class ReadPrompt(NamedTuple):
    """The tokens of a prompt. `is_exact`: they are those that the engine computes; else an estimate."""

    token_ids: list[int]
    is_exact: bool


class PromptReader:
    """Reads the prompt of a request. Does not raise for a bad body: the engine answers that."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        """The tokenizer is that of the model; without one, four bytes of text are a token."""
        self._tokenizer = tokenizer

    def read(self, form: PromptForm, scope: CacheScope, max_tokens: int) -> ReadPrompt:
        """The prompt's tokens. This may take long for a long prompt: call it off the event loop.

        Only requests of the same scope share what is cached of a prompt's encoding. No engine takes a prompt longer
        than `max_tokens`, so of such a prompt only the first `max_tokens + 1` tokens are read. As the engine does it,
        completions get special tokens, and chats go through the model's template. It is an estimate where the tokens
        are not known: the chat template cannot render the messages (for example images), or a field changes the prompt
        in a way that is not followed here. So it is for more tokens than any engine takes: the engine refuses those.
        """
        if form.is_exact and self._tokenizer is not None:
            try:
                if "messages" in form.body:
                    limit = PromptLimit(max_tokens, "messages")
                    return ReadPrompt(_chat(self._tokenizer, form.body, scope, limit), True)
                return ReadPrompt(_completion(self._tokenizer, form.body, PromptLimit(max_tokens, "prompt")), True)
            except RequestError as exc:
                logger.debug("a prompt could not be tokenized here: %s", exc)
        return _estimate(form, max_tokens)


def load_readers(tokenizers: dict[str, str]) -> dict[str, PromptReader]:
    """A reader for each model whose tokenizer is given. Raises `ConfigError` for one that cannot be loaded."""
    readers: dict[str, PromptReader] = {}
    for model, folder in tokenizers.items():
        try:
            readers[model] = PromptReader(Tokenizer(folder))
        except (OSError, ValueError) as exc:
            reason = str(exc).splitlines()[0] if str(exc) else type(exc).__name__
            raise ConfigError(f"tokenizers: {model!r} = {folder!r} cannot be loaded: {reason}") from exc
    return readers


def cache_salt_of(body: dict[str, Any]) -> str:
    """The client's own salt, "" if there is none. Raises `RequestError`, because no engine ever sees this salt."""
    salt = body.get("cache_salt")
    if not isinstance(salt, str | None):
        raise RequestError(
            f"Invalid value for 'cache_salt': expected a string, got {shown(msgspec.json.encode(salt))}.",
            param="cache_salt",
        )
    check_cache_salt(salt)
    return salt or ""


def priority_of(body: dict[str, Any]) -> int | None:
    """The priority in the request, if it names one. The engine refuses an invalid one, which counts as 0 here."""
    value = body.get("priority")
    if value is None:
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else 0


def _estimate(form: PromptForm, max_tokens: int) -> ReadPrompt:
    """Tokens of four bytes each. A shorter tail counts as one token."""
    body, max_bytes = form.body, (max_tokens + 1) * _BYTES_PER_TOKEN
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if ids := _token_ids(prompt, max_tokens):
            return ReadPrompt(ids, form.is_exact)
        prompt = next((item for item in prompt if isinstance(item, str)), "")
    if isinstance(prompt, str):
        return ReadPrompt(_text_tokens(prompt[:max_bytes].encode(errors="replace")[:max_bytes]), False)
    # A conversation grows at its end, so the parts that stay come first: tools, then messages.
    text = bytearray()
    for part in (body.get("tools"), *_as_list(body.get("messages"))):
        if part is not None:
            text += (b"\n" if text else b"") + _message_bytes(part)
        if len(text) > max_bytes:
            break
    return ReadPrompt(_text_tokens(bytes(text[:max_bytes])), False)


def _completion(tokenizer: Tokenizer, body: dict[str, Any], limit: PromptLimit) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        if ids := _token_ids(prompt, limit.max_tokens):
            return ids
        prompt = prompt[0] if prompt else ""
    if not isinstance(prompt, str):
        raise RequestError("not a text")
    add_special_tokens = body.get("add_special_tokens") is not False
    return tokenizer.encode(prompt, add_special_tokens=add_special_tokens, limit=limit)


def _chat(tokenizer: Tokenizer, body: dict[str, Any], scope: CacheScope, limit: PromptLimit) -> list[int]:
    fields = decode_body(msgspec.json.encode(body), ChatRequest)
    check_messages(fields.messages, fields.chat_template_kwargs)
    messages = template_messages(fields.messages)
    for message, given in zip(messages, body["messages"], strict=True):
        reasoning = given.get("reasoning") or given.get("reasoning_content")
        if isinstance(reasoning, str):  # templates know one name or the other
            message["reasoning"] = message["reasoning_content"] = reasoning
    options = template_options(fields.chat_template_kwargs, fields.add_generation_prompt)
    if isinstance(effort := body.get("reasoning_effort"), str):
        options = {"enable_thinking": effort != "none", "reasoning_effort": effort} | options
    if body.get("tools"):
        options["tools"] = _rendered_tools(body["tools"])
    add_special_tokens = bool(fields.add_special_tokens)
    return tokenizer.encode_chat(messages, options, scope, add_special_tokens=add_special_tokens, limit=limit)


def _rendered_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools as vLLM gives them to chat templates: known fields only, in this order. Raises `RequestError`."""
    rendered = []
    for tool in tools if isinstance(tools, list) else [None]:
        function = (
            tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        )
        if not isinstance(function, dict):
            raise RequestError("a tool that is not a function", param="tools")
        fields = {name: function.get(name) for name in ("name", "description", "parameters")}
        fields |= {name: function[name] for name in ("strict", "defer_loading") if function.get(name) is not None}
        rendered.append({"type": "function", "function": fields})
    return rendered


def _message_bytes(part: Any) -> bytes:
    """A message or the tools as bytes. Media become their hash, repeated to the length of their estimated tokens."""
    content = part.get("content") if isinstance(part, dict) else None
    if not isinstance(content, list):
        return msgspec.json.encode(part)
    is_text = [not isinstance(item, dict) or item.get("type") in _TEXT_PARTS for item in content]
    texts = [item for item, is_one in zip(content, is_text, strict=True) if is_one]
    media = [item for item, is_one in zip(content, is_text, strict=True) if not is_one]
    hashes = [hashlib.blake2b(msgspec.json.encode(item), digest_size=16).digest() for item in media]
    return b"".join(name * (MEDIA_TOKENS * _BYTES_PER_TOKEN // len(name)) for name in hashes) + msgspec.json.encode(
        part | {"content": texts}
    )


def _token_ids(prompt: list[Any], max_tokens: int) -> list[int]:
    """The ids of a prompt that consists of token ids, or of the first of several such prompts; else none."""
    ids = (prompt[0] if prompt and isinstance(prompt[0], list) else prompt)[: max_tokens + 1]
    is_ids = all(isinstance(token, int) and 0 <= token < 2**32 for token in ids)
    return list(ids) if is_ids else []


def _text_tokens(text: bytes) -> list[int]:
    padded = text + b"\0" * (-len(text) % _BYTES_PER_TOKEN)
    return list(struct.unpack(f"<{len(padded) // _BYTES_PER_TOKEN}I", padded))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

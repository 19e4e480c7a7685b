"""What of a request decides where it should go: its prompt as tokens, or as a stand-in for them.

With the model's tokenizer these are the tokens the engine computes too, so they match its KV events. Without one,
four bytes of text count as one token: near enough for lengths, and equal beginnings of texts stay equal beginnings.
"""

from __future__ import annotations

import logging
import struct
from typing import Any, Protocol

import orjson

from protocol.digest import CacheScope
from protocol.errors import RequestError
from router.openai.chat import template_messages, template_options
from router.openai.schema import ChatRequest, check_cache_salt, decode_body
from router.tokenizer import Tokenizer

__all__ = ["PromptReader", "TextReader", "TokenReader", "cache_salt_of", "max_tokens_of", "priority_of"]

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 4


class PromptReader(Protocol):
    """Reads the prompt of a request body. Never raises for what a client sent: the engine judges that."""

    def read(self, body: dict[str, Any], scope: CacheScope) -> list[int]:
        """Its tokens. May take long for a long prompt: call it off the event loop.

        What is remembered of it is for requests of the same scope only.
        """


class TextReader:
    """Stand-in tokens out of the text."""

    def read(self, body: dict[str, Any], scope: CacheScope) -> list[int]:
        """Four bytes each; the tail that is shorter counts as one."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            if ids := _token_ids(prompt):
                return ids
            prompt = next((item for item in prompt if isinstance(item, str)), "")
        if isinstance(prompt, str):
            return _text_tokens(prompt.encode(errors="replace"))
        # A conversation grows at its end, so what comes first in every turn must come first here: tools, then messages.
        parts = [body.get("tools"), *_as_list(body.get("messages"))]
        return _text_tokens(b"\n".join(orjson.dumps(part) for part in parts if part is not None))


class TokenReader:
    """The model's own tokens; the stand-in where its template cannot render the messages (images, say)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = TextReader()

    def read(self, body: dict[str, Any], scope: CacheScope) -> list[int]:
        """As the engine tokenizes it: completions with special tokens, chat through the model's template."""
        try:
            return self._chat(body, scope) if "messages" in body else self._completion(body)
        except RequestError as exc:
            logger.debug("a prompt could not be tokenized here: %s", exc)
            return self._text.read(body, scope)

    def _completion(self, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            if ids := _token_ids(prompt):
                return ids
            prompt = prompt[0] if prompt else ""
        if not isinstance(prompt, str):
            raise RequestError("not a text")
        return self._tokenizer.encode(prompt, add_special_tokens=body.get("add_special_tokens") is not False)

    def _chat(self, body: dict[str, Any], scope: CacheScope) -> list[int]:
        fields = decode_body(orjson.dumps(body), ChatRequest)
        messages = template_messages(fields.messages)
        options = template_options(fields.chat_template_kwargs, fields.add_generation_prompt)
        if body.get("tools") and body.get("tool_choice") != "none":
            options["tools"] = body["tools"]
        return self._tokenizer.encode_chat(messages, options, scope, add_special_tokens=bool(fields.add_special_tokens))


def max_tokens_of(body: dict[str, Any]) -> int | None:
    """Tokens the answer may have, as far as the request says."""
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def cache_salt_of(body: dict[str, Any]) -> str:
    """The salt of the client's own, "" where it gives none. Raises `RequestError`: no engine sees it as it is."""
    salt = body.get("cache_salt")
    if not isinstance(salt, str | None):
        raise RequestError("Invalid value for 'cache_salt': expected a string.", param="cache_salt")
    check_cache_salt(salt)
    return salt or ""


def priority_of(body: dict[str, Any]) -> int:
    """How urgent the request says it is; what is no priority the engine will refuse."""
    value = body.get("priority")
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**31 else 0


def _token_ids(prompt: list[Any]) -> list[int]:
    """The ids of a prompt that consists of them, or of the first of several such prompts; else none."""
    ids = prompt[0] if prompt and isinstance(prompt[0], list) else prompt
    is_ids = all(isinstance(token, int) and 0 <= token < 2**32 for token in ids)
    return list(ids) if is_ids else []


def _text_tokens(text: bytes) -> list[int]:
    padded = text + b"\0" * (-len(text) % _BYTES_PER_TOKEN)
    return list(struct.unpack(f"<{len(padded) // _BYTES_PER_TOKEN}I", padded))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []

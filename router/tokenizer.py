"""Text to token ids and back: a model folder's tokenizer and chat template, and the threads they run on.

Works without torch. Encoding goes to the fast tokenizer underneath, whose calls are free of shared state: the
transformers wrapper sets truncation and padding on each call, which fails when two threads meet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from protocol.digest import CacheScope
from protocol.errors import ConfigError, RequestError
from router.detokenizer import Detokenizer
from router.segments import SegmentEncoder

__all__ = ["Tokenizer", "TokenizerPool"]

T = TypeVar("T")

MIN_THREAD_BYTES = 2048  # of text: about 500 tokens, encoded within a millisecond


class Tokenizer:
    """A model's tokenizer. Every method may be called from several threads at once."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer  # NOTE: brings torch, 2 s and 200 MB that a router of engines can spare

        self._hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if not self._hf.is_fast:
            raise ConfigError(f"The tokenizer in {folder} is not a fast one; convert it to a tokenizer.json")
        self._fast = self._hf.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._segments = SegmentEncoder(self._fast)
        self.special_ids = frozenset(i for i, token in self._fast.get_added_tokens_decoder().items() if token.special)
        self.start_id: int | None = (
            self._hf.bos_token_id if self._hf.bos_token_id is not None else self._hf.eos_token_id
        )
        # Counted over ids: ids need not be dense, and the largest one is what bounds a lookup.
        self.vocab_size: int = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        self._anchor: list[int] = self._fast.encode("a", add_special_tokens=False).ids
        self._anchor_text = self.decode(self._anchor)
        self._texts: dict[int, str] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with what the model puts around one (a BOS, say) unless told otherwise."""
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render_chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Text of a conversation. Raises `RequestError` where the template refuses it.

        `options` are variables of the template, such as `add_generation_prompt`.
        """
        if not self._hf.chat_template:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        try:
            text: str = self._hf.apply_chat_template(messages, tokenize=False, **options)
        except jinja2.TemplateError as exc:
            raise RequestError(f"The chat template refused the messages: {exc}", param="messages") from exc
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as exc:  # the last: nested too deeply
            raise RequestError("The chat template cannot render these messages.", param="messages") from exc
        return text

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        scope: CacheScope,
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a conversation. The template writes its own BOS, so none is added by default.

        Of a conversation that grows, only what is new takes time; `scope` is whom it is remembered for.
        """
        text = self.render_chat(messages, options)
        return self.encode(text) if add_special_tokens else self._segments.encode(text, scope)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; an incomplete character becomes U+FFFD."""
        text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return [self._fast.id_to_token(i) or "" for i in token_ids]

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> Detokenizer:
        """Incremental decoder of what follows this prompt."""
        skip_ids = self.special_ids if skip_special_tokens else frozenset[int]()
        return Detokenizer(self.decode, prompt_ids=prompt_ids, skip_ids=skip_ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token as it reads within a text: its leading space is kept."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([*self._anchor, token_id])[len(self._anchor_text) :]
            self._texts[token_id] = text  # bounded by the vocabulary
        return text


class TokenizerPool:
    """Runs tokenizer work on a few threads, so that a long prompt does not hold up everybody's streams."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")

    async def run(self, work: Callable[[], T], *, num_bytes: int = MIN_THREAD_BYTES) -> T:
        """Result of `work` on so much text, called on one of the threads; waits while all are taken.

        Little text is worked on here: waking a thread takes longer, up to 5 ms where the event loop is busy.
        """
        if num_bytes < MIN_THREAD_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Let running work end and drop what waits."""
        self._executor.shutdown(wait=False, cancel_futures=True)

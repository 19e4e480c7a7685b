"""Text to token ids and back: a model folder's tokenizer and chat template, and the threads they run on.

Works without torch. Encoding uses the fast tokenizer inside transformers' wrapper, because its calls share no state:
the wrapper sets truncation and padding on each call, which fails if two threads meet. Long texts go to its batch calls,
even a single text: the other calls hold the GIL, and the event loop would stall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import ConfigError, RequestError
from tandem.text.detokenizer import Detokenizer
from tandem.text.fair_threads import FairThreads
from tandem.text.segments import SegmentEncoder
from tandem.text.token_lengths import PromptLimit, byte_shares, token_length

T = TypeVar("T")

MIN_THREAD_BYTES = 2048  # bytes of text: about 500 tokens, encoded within a millisecond
LONG_BYTES = 32 * 1024  # encoded in about 20 ms
FEW_CHARS = 8  # for each token that fits: a text with less is encoded in time that is well spent
LONG_TOKENS = 1024  # decoded within half a millisecond


class Tokenizer:
    """A model's tokenizer. Thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        from transformers import AutoTokenizer  # here: 2 s and 60 MB that a router without tokenizers can spare

        self._hf: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        if not self._hf.is_fast:
            raise ConfigError(f"The tokenizer in {folder} is not a fast one; convert it to a tokenizer.json")
        self._fast = self._hf.backend_tokenizer
        self._fast.no_truncation()
        self._fast.no_padding()
        self._segments = SegmentEncoder(self._fast)
        self._token_length = token_length(self._fast)
        self._byte_shares = byte_shares(self._fast)
        added = self._fast.get_added_tokens_decoder()
        self.special_tokens: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.start_id: int | None = (
            self._hf.bos_token_id if self._hf.bos_token_id is not None else self._hf.eos_token_id
        )
        # By the largest id, which bounds a look-up: ids need not be dense.
        self.vocab_size: int = max(self._fast.get_vocab(with_added_tokens=True).values()) + 1
        self._anchor: list[int] = self._fast.encode("a", add_special_tokens=False).ids
        self._anchor_text = self.decode(self._anchor)
        self._texts: dict[int, str] = {}

    def to_json(self) -> str:
        """The text of its `tokenizer.json`, with the tokens that were added."""
        text: str = self._fast.to_str()
        return text

    def check_length(self, text: str, limit: PromptLimit) -> None:
        """Raise `ContextLengthExceeded` if the text is too long by its length alone. Does not encode it."""
        if self._token_length is not None:
            _check_least(text, self._token_length.min_tokens(text), limit)

    def _check_bytes(self, text: str, limit: PromptLimit) -> None:
        """As `check_length`, but by all characters of the text, which takes longer: call it in a thread."""
        self.check_length(text, limit)
        if self._byte_shares is not None and len(text) > FEW_CHARS * limit.max_tokens:
            _check_least(text, self._byte_shares.min_tokens(text), limit)

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: PromptLimit | None = None) -> list[int]:
        """Token ids of a text, by default with the special tokens that the model puts around one (a BOS, say).

        Raises `ContextLengthExceeded` if there are more than the limit allows.
        """
        if limit is not None:
            self._check_bytes(text, limit)
        encoding = self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if limit is not None:
            limit.check(len(encoding))
        ids: list[int] = encoding.ids
        return ids

    def token_ends(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Up to which character of a text each of its tokens reaches, in order."""
        encoding = self._fast.encode(text, add_special_tokens=add_special_tokens)
        return [end for _, end in encoding.offsets]  # starts may leave out white space

    def render_chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Text of a conversation. Raises `RequestError` if the template refuses it.

        `options` are variables of the template, such as `add_generation_prompt`.
        """
        if not self._hf.chat_template:
            raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
        try:
            text: str = self._hf.apply_chat_template(messages, tokenize=False, **options)
        except jinja2.TemplateError as exc:
            raise RequestError(f"The chat template refused the messages: {exc}", param="messages") from exc
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
            raise RequestError("The chat template cannot render these messages.", param="messages") from exc
        return text

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        options: dict[str, Any],
        scope: CacheScope,
        *,
        add_special_tokens: bool = False,
        limit: PromptLimit | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template writes its own BOS, so none is added by default.

        Only the new part of a growing conversation is encoded; the rest is cached, for requests of the same `scope`.
        Raises `ContextLengthExceeded` if there are more ids than the limit allows.
        """
        text = self.render_chat(messages, options)
        if add_special_tokens:
            return self.encode(text, limit=limit)
        if limit is not None:
            self._check_bytes(text, limit)
        return self._segments.encode(text, scope, limit)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; an incomplete character becomes U+FFFD."""
        if len(token_ids) > LONG_TOKENS:
            text: str = self._fast.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        else:
            text = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return [self._fast.id_to_token(i) or "" for i in token_ids]

    @property
    def chat_template(self) -> str:
        """The chat template, in the form for tools if there are several; empty if there is none."""
        template: str | dict[str, str] = self._hf.chat_template or ""
        return template if isinstance(template, str) else template.get("tool_use") or template.get("default", "")

    @property
    def response_template(self) -> Any:
        """How transformers parses the model's answers, if the checkpoint says it; otherwise None."""
        return getattr(self._hf, "response_template", None)

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """Incremental decoder of the tokens that follow this prompt. `shown_ids` are special tokens not to skip."""
        skip_ids = self.special_ids - shown_ids if skip_special_tokens else frozenset[int]()
        return Detokenizer(self._fast, prompt_ids=prompt_ids, skip_ids=skip_ids)

    def token_text(self, token_id: int) -> str:
        """Text of one token inside a text, with its leading space."""
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([*self._anchor, token_id])[len(self._anchor_text) :]
            self._texts[token_id] = text  # bounded by the vocabulary
        return text


def _check_least(text: str, num_tokens: int, limit: PromptLimit) -> None:
    limit.check(num_tokens, f"{len(text)} characters, which are at least {num_tokens} tokens")


def is_short(num_bytes: int) -> bool:
    """Whether work on a text of this size is done at once. Waking a thread takes up to 5 ms if the loop is busy."""
    return num_bytes < MIN_THREAD_BYTES


class TokenizerPool:
    """Runs work on texts that are not short on a few threads, so that a long prompt does not delay other streams.

    Texts of medium size have threads of their own, because a long one may take seconds.
    """

    def __init__(self, num_threads: int = 2) -> None:
        """`num_threads` for texts of medium size, and as many for long ones."""
        self._medium = FairThreads(num_threads, "tokenizer")
        self._long = FairThreads(num_threads, "long-texts")

    async def run(self, work: Callable[[], T], *, tenant: str, num_bytes: int) -> T:
        """Result of `work`, run on one of the threads in the tenant's turn. `num_bytes` is the size of its text."""
        threads = self._medium if num_bytes < LONG_BYTES else self._long
        return await threads.run(work, tenant=tenant, amount=num_bytes)

    def close(self) -> None:
        """Let running work finish, and drop the queue."""
        self._medium.close()
        self._long.close()

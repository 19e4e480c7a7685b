"""Incremental detokenization: token ids in, text out as soon as it is complete.

Text once returned is never taken back, so what a later token could still change is held back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

CONTEXT_TOKENS = 6  # tokens of the prompt: enough for a decoder to know that the answer does not start a text
MAX_HELD_TOKENS = 32  # more tokens than this without a complete character are not text
REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one growing token sequence, in pieces that join to the decoded whole.

    A token's text depends on its neighbours (a leading space, a character of several byte tokens). `DecodeStream`
    decodes each token with those before it, and holds it back while its last character is incomplete. It would hold
    back invalid bytes forever, and decode more of them with each token: those are decoded here.
    """

    def __init__(self, fast: FastTokenizer, *, prompt_ids: Sequence[int] = (), skip_ids: Collection[int] = ()) -> None:
        self._fast = fast
        self._skip_ids = skip_ids
        self._context: list[int]  # decoded again, because the next tokens' text depends on them
        self._held: list[int]  # tokens whose text was not returned yet
        self._stream: DecodeStream
        self._start([i for i in prompt_ids[-CONTEXT_TOKENS:] if i not in skip_ids])

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete: often that of all of them, sometimes none."""
        text = ""
        for token_id in token_ids:
            if token_id in self._skip_ids:
                continue
            self._held.append(token_id)
            try:
                piece = self._stream.step(self._fast, token_id)
            except Exception:  # `tokenizers` raises nothing narrower: this token changes text that was sent
                text += self.flush()
                continue
            if piece is not None:
                text += piece
                self._context, self._held = self._held, []
            elif len(self._held) >= MAX_HELD_TOKENS:
                text += self.flush()
        return text

    def flush(self) -> str:
        """Return what is held back, with U+FFFD for a character cut short. Called by the owner once, at the end."""
        if not self._held:
            return ""
        text = self._decode([*self._context, *self._held])[len(self._decode(self._context)) :]
        self._start(self._held)
        return text

    def _start(self, context: list[int]) -> None:
        """Continue after these tokens, or without context if they end within a character."""
        if context and self._decode(context).endswith(REPLACEMENT):
            context = []
        self._context, self._held = context, []
        self._stream = DecodeStream(ids=context)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._fast.decode(token_ids, skip_special_tokens=False))

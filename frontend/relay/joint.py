"""The joint of a stream that continues on another engine: after the last token that counts, before the next engine's.

    tokens   | prompt | output, kept               | dropped |   a token that ends within a character is computed again
    text              | shown            | pending |             what the engine held back: it may begin a stop string

The router does not have the engine's tokenizer, so it asks the engine for the text of the tokens. That must equal the
text that was shown, plus what was held back for stop strings. Otherwise a part of the stream is unknown, and it ends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.frontend.relay.sse import PORTION_BYTES, end_of_event, split_events
from tandem.frontend.relay.stream_ledger import StreamLedger, body_of
from tandem.text.stop_strings import StopMatcher, StopStrings

Json = dict[str, Any]

_NUM_CONTEXT_TOKENS = 16  # tokens of the prompt that are decoded too: a token's text may depend on those before it
_MAX_PARTIAL_TOKENS = 8  # tokens that may share one character: 4 in UTF-8, and some tokenizers add empty ones
_REPLACEMENT = "\ufffd"  # what incomplete characters are decoded to


class CannotContinue(Exception):
    """A stream cannot go on. Its text says why."""


@dataclass(frozen=True, slots=True)
class Joint:
    """`num_kept` tokens of the output come before it. `pending` is the end of their text, which was not shown yet."""

    num_kept: int
    text: str  # text of the output that is kept, pending text included
    pending: str


async def find_joint(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    shown: str,
    max_held_chars: int,
    decode: Callable[[list[int]], Awaitable[str]],
) -> Joint:
    """The joint after as many tokens as possible. `decode` gives the text of token ids.

    Stop strings may have held back `max_held_chars` of the text. Raises `CannotContinue`, and what `decode` raises.
    """
    context = list(prompt_ids[-_NUM_CONTEXT_TOKENS:])
    before = await decode(context)
    if before.endswith(_REPLACEMENT):
        raise CannotContinue("its prompt ends within a character")
    for num_kept in range(len(output_ids), max(len(output_ids) - _MAX_PARTIAL_TOKENS, 0), -1):
        whole = await decode([*context, *output_ids[:num_kept]])
        if not whole.endswith(_REPLACEMENT):
            break
    else:
        num_kept, whole = 0, before
    text = whole[len(before) :]
    pending = text[len(shown) :]
    if not whole.startswith(before) or not text.startswith(shown) or len(pending) > max_held_chars:
        raise CannotContinue("its text is not that of its tokens alone")
    return Joint(num_kept, text, pending)


class ContinuedStream:
    """Turns the events of a completion behind a joint into the rest of the former stream, its stop strings included."""

    def __init__(self, ledger: StreamLedger, joint: Joint, stops: Sequence[str]) -> None:
        """The ledger keeps the tokens before the joint only."""
        del ledger.output_ids[joint.num_kept :]
        self._ledger = ledger
        self._stops = StopMatcher(StopStrings(stops) if stops else None)
        self._is_over = False
        # The matcher must know the text that a stop string may begin in, of which a part was shown.
        num_known = max(map(len, stops), default=1) - 1
        known = joint.text[-num_known:] if num_known else ""
        self._num_shown_chars = len(known) - len(joint.pending)  # how much of what the matcher returns next was shown
        self._due = self._unshown(self._stops.push(known).text)

    def rewrite(self, events: bytes) -> tuple[bytes, int, int, int]:
        """As `Rewrite`: the events that the client is shown for these."""
        end = end_of_event(events, PORTION_BYTES)
        raws = split_events(events[:end])
        return b"".join([self._rewritten(raw) for raw in raws]), 0, len(raws), end

    def _rewritten(self, raw: bytes) -> bytes:
        if self._is_over:
            return b""
        body = body_of(raw)
        if body is None or body.get("error"):
            return raw
        choices = body.get("choices")
        if not choices:
            return self._ledger.usage_event() if body.get("usage") else b""
        choice = choices[0] if isinstance(choices, list) else None
        return self._piece(choice if isinstance(choice, dict) else {})

    def _piece(self, choice: Json) -> bytes:
        text = choice.get("text")
        match = self._stops.push(text if isinstance(text, str) else "")
        shown = self._due + self._unshown(match.text)
        self._due = ""
        if match.stop is None and choice.get("finish_reason") is not None:
            match = self._stops.flush()
            shown += self._unshown(match.text)
            if match.stop is not None:
                choice = choice | {"finish_reason": "stop", "stop_reason": match.stop}
        elif match.stop is not None:
            choice = choice | {"finish_reason": "stop", "stop_reason": match.stop}
            self._is_over = True
        is_last = choice.get("finish_reason") is not None
        self._ledger.note(shown, choice.get("token_ids"), is_last=is_last)
        return self._ledger.piece(shown, choice) + (self._ledger.ending() if self._is_over else b"")

    def _unshown(self, text: str) -> str:
        """The part of the matcher's next text that was not shown before the joint."""
        num_shown = min(self._num_shown_chars, len(text))
        self._num_shown_chars -= num_shown
        return text[num_shown:]

"""Grammars that an answer must match, in llguidance's form: what router and engine must agree on.

The router checks a grammar before a request is placed; the engine masks the tokens that the grammar does not allow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import llguidance

from tandem.protocol.errors import RequestError

MAX_FORCED_BYTES = (
    4096  # each mask within them cuts those that are left into tokens: a millisecond for each 1,000 or so
)

# With llguidance's defaults, a mask of an ambiguous grammar of 40 characters takes 1.4 s. With these, about 20 ms.
_LIMITS = llguidance.LLParserLimits(
    step_max_items=10_000,
    step_lexer_fuel=200_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    verbose_errors=False,
)

# Limits of a probe. Looking for forced bytes makes lexer states, one or more for each byte. With the limits above it
# may take 50 ms, with these about 3 ms.
_PROBE_LIMITS = llguidance.LLParserLimits(
    step_max_items=2_000,
    step_lexer_fuel=50_000,
    max_items_in_row=500,
    max_lexer_states=4_000,
    verbose_errors=False,
)
_MAX_FIXED_START = 512  # bytes of a fixed text with which a probe's grammar may begin


class GrammarError(RequestError):
    """A grammar is malformed, too large, or costs too much."""

    code = "invalid_grammar"


@contextmanager
def grammar_errors_only() -> Iterator[None]:
    """Turn whatever the block raises into a `GrammarError`."""
    try:
        yield
    except GrammarError:
        raise
    except BaseException as exc:  # a panic of llguidance is not an Exception: it would end the thread or the process
        raise GrammarError(f"The grammar cannot be used: {' '.join(str(exc).split())[:300]}") from exc


def make_grammar_tokenizer(
    tokenizer_json: str, vocab_size: int | None, eos_token_ids: Iterable[int]
) -> llguidance.LLTokenizer:
    """The form of a tokenizer that grammars are compiled for. `tokenizer_json` is the text of a `tokenizer.json`.

    `vocab_size` is the number of logits (None = the tokenizer's own), `eos_token_ids` are the tokens with which an
    answer may end. Takes up to seconds for a large vocabulary.
    """
    return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=sorted(eos_token_ids) or None)


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the grammar's beginning. Raises `GrammarError`.

    NOTE: a few grammars take minutes (for example an integer that is a multiple of a large prime), in one call without
    the interpreter's lock, which ends only with its process.
    """
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    check_matcher(matcher)
    return matcher


def compile_probe(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher | None:
    """A matcher for looking for forced tokens only: no call of it takes long. None for a grammar that is too large."""
    probe = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=_PROBE_LIMITS)
    # NOTE: the lexer has no limits before the first mask at a place with a choice; then it has what that mask left.
    for num_tokens in range(_MAX_FIXED_START):
        mask = int.from_bytes(probe.compute_bitmask(), "little")
        if probe.is_error():
            return None
        num_forced = len(probe.compute_ff_bytes())
        if num_forced > _MAX_FIXED_START:  # a mask within it takes time in proportion to the rest
            return None
        if not num_forced:
            probe.rollback(num_tokens)
            return None if probe.is_error() else probe
        probe.consume_tokens([(mask & -mask).bit_length() - 1])  # the only token
        if probe.is_stopped():
            break
    return None


def num_forced_bytes(matcher: llguidance.LLMatcher) -> int:
    """How many of the next bytes are forced. Raises `GrammarError` if they are too many."""
    num_bytes = len(matcher.compute_ff_bytes())
    if num_bytes > MAX_FORCED_BYTES:
        limit = f"at most {MAX_FORCED_BYTES} are allowed"
        raise GrammarError(f"The grammar cannot be used: it leaves no choice for {num_bytes} bytes in a row; {limit}")
    return num_bytes


def check_matcher(matcher: llguidance.LLMatcher) -> None:
    """Raise `GrammarError` if the grammar cannot be used, or not any further."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())[:300]
        raise GrammarError(f"The grammar cannot be used: {reason}")

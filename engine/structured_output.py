"""Structured output: which tokens a sequence's grammar allows next.

Masks of a step are computed in a thread of their own while the step's forward runs. A matcher is a function of its
grammar and the output so far: a worker that takes over a sequence makes its own and lets it follow the output, and so
the tokens do not depend on where, or in which batch, they were computed.
"""

from __future__ import annotations

import functools
import itertools
import os
import queue
import weakref
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import numpy as np
from transformers import AutoTokenizer

from tandem.protocol.fault_boundary import error_of, outcome_of
from tandem.protocol.grammar import (
    GrammarError,
    check_matcher,
    compile_grammar,
    make_grammar_tokenizer,
    num_forced_bytes,
)

__all__ = ["GrammarMatcher", "StructuredOutput", "TokenMask"]

_MAX_COMPILED = 64  # grammars that are kept: requests of one application share theirs
_MAX_THREADS = 8  # that compute masks
_MAX_RUN_BYTES = 512  # of a forced text whose tokens are looked for one by one: each time the rest of it is cut anew

TokenMask = np.ndarray[Any, Any]  # [ceil(vocab / 32)], int32; bit i of word w allows token 32 w + i


class _Compilation:
    """A grammar, and the matcher at its beginning once it is compiled. Its matchers keep it alive while it waits."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.order: float | None = None  # in which it waits
        self.matcher: Future[llguidance.LLMatcher] = Future()


class _Waiting(NamedTuple):
    """A grammar to compile, unless all who asked for it have left. The smallest one is compiled next."""

    order: float
    number: int  # in order of arrival, each once
    compilation: weakref.ref[_Compilation]


class GrammarMatcher:
    """How far a sequence's output has come in its grammar. One thread at a time may use it."""

    def __init__(self, compilation: _Compilation) -> None:
        self._compilation = compilation
        self._matcher: llguidance.LLMatcher | None = None
        self.num_consumed = 0  # tokens of the output

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled, or was found to be unusable."""
        return self._compilation.matcher.done()

    def follow(self, new_ids: list[int]) -> llguidance.LLMatcher:
        """The matcher behind these tokens, which come after those that it has consumed.

        Raises `GrammarError` if the output does not match, or costs too much.
        """
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._compilation.matcher.result().deep_copy()
        self.num_consumed += len(new_ids)
        if new_ids:
            matcher.consume_tokens(new_ids)
        check_matcher(matcher)
        return matcher

    def forced_token(self, new_ids: list[int]) -> int | None:
        """The only token that may follow these ones, if that is known without the mask. Raises `GrammarError`.

        llguidance finds bytes that are the only ones which fit, and cuts them into tokens as the tokenizer does. Its
        mask allows the first of these tokens and no other.
        """
        matcher = self.follow(new_ids)
        if not 0 < num_forced_bytes(matcher) <= _MAX_RUN_BYTES:
            return None
        forced: list[int] = matcher.compute_ff_tokens()
        return forced[0] if forced else None

    def before_mask(self, new_ids: list[int]) -> llguidance.LLMatcher:
        """The matcher behind these tokens, if its mask does not cost too much. Raises `GrammarError`."""
        matcher = self.follow(new_ids)
        num_forced_bytes(matcher)
        return matcher

    def is_complete(self, new_ids: list[int]) -> bool:
        """Whether nothing may follow these tokens. Raises `GrammarError` as `follow` does."""
        return bool(self.follow(new_ids).is_stopped())


class StructuredOutput:
    """Compiles an engine's grammars and computes its masks. `close` ends its threads."""

    def __init__(self, model_folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder, self._vocab_size, self._eos_token_ids = model_folder, vocab_size, eos_token_ids
        self._wanted: weakref.WeakValueDictionary[str, _Compilation] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, _Compilation] = OrderedDict()  # compiled, the latest used last
        self._compiled: deque[_Compilation] = deque()  # by the compiler's thread, not among `_kept` yet
        self._waiting: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._no_end = _mask_without(vocab_size, eos_token_ids)
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._masker = ThreadPoolExecutor(1, "token-masks")

    def matcher(self, grammar: str, order: float = 0.0) -> GrammarMatcher:
        """A matcher at the grammar's beginning, which is compiled in the background, the smallest `order` first.

        A grammar that waits for the compiler is dropped once nobody refers to a matcher of it.
        """
        self._keep_compiled()
        compilation = self._wanted.get(grammar)
        if compilation is None:
            compilation = self._wanted[grammar] = _Compilation(grammar)
        if grammar in self._kept:
            self._kept.move_to_end(grammar)
        elif compilation.order is None or (order < compilation.order and not compilation.matcher.done()):
            compilation.order = order
            self._waiting.put(_Waiting(order, next(self._numbers), weakref.ref(compilation)))
            self._compiler.submit(self._compile_next)
        return GrammarMatcher(compilation)

    def masks(self, rows: list[tuple[GrammarMatcher, list[int]]]) -> Future[list[TokenMask | Exception]]:
        """What each matcher allows behind its new tokens, or why it cannot go on; computed in the background."""
        return self._masker.submit(self._compute_masks, rows)

    def close(self) -> None:
        """End the threads, without waiting for a grammar that is being compiled."""
        for pool in (self._compiler, self._masker):
            pool.shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _executor(self) -> llguidance.LLExecutor:
        """Its threads run from when it is made, and most engines never need them."""
        return llguidance.LLExecutor(min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 1)))

    def _keep_compiled(self) -> None:
        while self._compiled:
            compilation = self._compiled.popleft()
            self._kept[compilation.grammar] = compilation
            if len(self._kept) > _MAX_COMPILED:
                self._kept.popitem(last=False)

    def _compute_masks(self, rows: list[tuple[GrammarMatcher, list[int]]]) -> list[TokenMask | Exception]:
        followed = [outcome_of(matcher.before_mask, new_ids) for matcher, new_ids in rows]
        masks = np.empty((len(rows), len(self._no_end)), dtype=np.int32)
        matchers = [(one, row) for row, one in enumerate(followed) if not isinstance(one, Exception)]
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(rows))
        for matcher, row in matchers:
            if (error := error_of(check_matcher, matcher)) is not None:
                followed[row] = error
            elif not matcher.is_accepting():  # an end token that is also a piece of text would cut the output
                masks[row] &= self._no_end
        return [one if isinstance(one, Exception) else masks[row] for row, one in enumerate(followed)]

    def _compile_next(self) -> None:
        compilation = self._waiting.get_nowait().compilation()
        if compilation is None or compilation.matcher.done():  # nobody waits for it, or it was asked for twice
            return
        matcher = outcome_of(self._compile, compilation.grammar)
        if isinstance(matcher, Exception):
            compilation.matcher.set_exception(matcher)
        else:
            compilation.matcher.set_result(matcher)
        self._compiled.append(compilation)

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        try:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return compile_grammar(self._tokenizer, grammar)
        except GrammarError:
            raise
        except BaseException as exc:  # a panic of llguidance is no Exception, and would end the engine
            raise GrammarError(f"The grammar cannot be used: {exc}") from exc

    def _load_tokenizer(self) -> llguidance.LLTokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False).backend_tokenizer
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return make_grammar_tokenizer(tokenizer.to_str(), self._vocab_size, self._eos_token_ids)
        except (OSError, ValueError, AttributeError, ImportError) as exc:
            raise GrammarError(f"This model has no tokenizer that structured output can use: {exc}") from exc


def _mask_without(vocab_size: int, token_ids: frozenset[int]) -> TokenMask:
    """A mask that allows all tokens but these."""
    allowed = np.ones(-(-vocab_size // 32) * 32, dtype=np.uint8)
    allowed[list(token_ids)] = 0
    return np.packbits(allowed, bitorder="little").view(np.int32)

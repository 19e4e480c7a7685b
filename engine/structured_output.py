"""Structured output: which tokens a sequence's grammar allows next.

Masks of a step are computed in threads of their own while the step's forward runs. A sequence whose mask takes long
leaves its place in the steps until the mask is there, so the others do not wait for it. A matcher is a function of its
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
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import llguidance
import numpy as np
from transformers import AutoTokenizer

from tandem.engine.number_tokens import NumberTokens, TokenMask, mask_without, writes_json
from tandem.protocol.fault_boundary import error_of, outcome_of
from tandem.protocol.grammar import (
    GrammarError,
    check_matcher,
    compile_grammar,
    compile_probe,
    grammar_errors_only,
    make_grammar_tokenizer,
    num_forced_bytes,
)

__all__ = ["GrammarMatcher", "StructuredOutput", "TokenMask"]

MAX_COMPILED = 64  # grammars that are kept: requests of one application share theirs
_MAX_THREADS = 8  # threads that compute masks
_MAX_RUN_BYTES = 512  # of a forced text whose tokens are looked for one by one: each time the rest of it is cut anew
# Wait for masks after a step's forward. Most take less than a millisecond, but all cores may be busy.
_MAX_MASK_WAIT_S = 0.02


class _Compiled(NamedTuple):
    """A grammar at its beginning."""

    matcher: llguidance.LLMatcher
    probe: llguidance.LLMatcher | None  # looks for forced tokens; None if the grammar is too large for that
    numbers: NumberTokens | None  # ends numbers that are too long; None if the grammar has no JSON


class _Compilation:
    """A grammar, and its compiled form once that is there. Its matchers keep it alive while it waits."""

    def __init__(self, grammar: str) -> None:
        self.grammar = grammar
        self.order: float | None = None  # its place in the line
        self.compiled: Future[_Compiled] = Future()


class _GrammarTokenizer(NamedTuple):
    """The model's tokenizer, as grammars use it, and its tokens that make numbers long."""

    tokenizer: llguidance.LLTokenizer
    numbers: NumberTokens


class _Waiting(NamedTuple):
    """A grammar to compile, unless all requests for it have left. The smallest one is compiled next."""

    order: float
    number: int  # in order of arrival, each once
    compilation: weakref.ref[_Compilation]


class _PendingMask(NamedTuple):
    """A mask that is being computed: one row of those that are computed together."""

    rows: Future[list[TokenMask | Exception]]
    row: int


class GrammarMatcher:
    """How far a sequence's output has come in its grammar. One thread at a time may use it."""

    def __init__(self, compilation: _Compilation) -> None:
        self._compilation = compilation
        self._matcher: llguidance.LLMatcher | None = None
        self._probe: llguidance.LLMatcher | None = None
        self.num_consumed = 0  # tokens of the output
        self._number_run = 0  # characters of numbers in a row, at the end of what it has consumed
        self.num_probed = 0  # tokens of the output that the probe has consumed
        self.pending: _PendingMask | None = None
        self.is_slow = False  # its last mask was late: the next one does not delay those of others
        self._is_late = False  # the pending mask

    @property
    def is_ready(self) -> bool:
        """Whether the next token may be sampled: the grammar is compiled or unusable, and no late mask is computed."""
        return self._compilation.compiled.done() and (self.pending is None or self.pending.rows.done())

    def follow(self, new_ids: list[int]) -> llguidance.LLMatcher:
        """The matcher after these tokens, which follow those that it has consumed.

        Raises `GrammarError` if the output does not match, or costs too much.
        """
        matcher, compiled = self._matcher, self._compilation.compiled.result()
        if matcher is None:
            matcher = self._matcher = compiled.matcher.deep_copy()
        self.num_consumed += len(new_ids)
        if new_ids:
            matcher.consume_tokens(new_ids)
            if compiled.numbers is not None:
                self._number_run = compiled.numbers.run_after(self._number_run, new_ids)
        check_matcher(matcher)
        return matcher

    def end_number(self, mask: TokenMask) -> None:
        """End a number of JSON that is too long, in the mask that follows what it has consumed."""
        numbers = self._compilation.compiled.result().numbers
        if numbers is not None:
            numbers.end_number(mask, self._number_run)

    def forced_token(self, new_ids: list[int]) -> int | None:
        """The only token that may follow these ones, if that is known without the mask.

        The new tokens come after those that it has probed.

        llguidance finds bytes that are the only ones which fit, and cuts them into tokens as the tokenizer does. Its
        mask allows the first of these tokens and no other. The search has no bound of its own, so a probe makes it: a
        matcher of tight limits, which is given up when it reaches them.
        """
        compiled = self._compilation.compiled.result()
        if self.num_probed == 0 and compiled.probe is not None:
            self._probe = compiled.probe.deep_copy()
        self.num_probed += len(new_ids)
        probe = self._probe
        if probe is None:
            return None
        if new_ids:
            probe.consume_tokens(new_ids)
        num_bytes = len(probe.compute_ff_bytes())
        if probe.is_error():
            self._probe = None
            return None
        if not 0 < num_bytes <= _MAX_RUN_BYTES:
            return None
        forced: list[int] = probe.compute_ff_tokens()
        return forced[0] if forced else None

    def is_complete(self, new_ids: list[int]) -> bool:
        """Whether nothing may follow these tokens. Raises `GrammarError`, as `follow` does."""
        return bool(self.follow(new_ids).is_stopped())

    def take_mask(self) -> TokenMask | Exception | None:
        """The mask that was begun last, or why there is none; None while it is computed."""
        pending = self.pending
        assert pending is not None, "no mask was begun"
        if not pending.rows.done():
            self.is_slow = self._is_late = True
            return None
        self.pending = None
        self.is_slow, self._is_late = self._is_late, False
        if (error := pending.rows.exception()) is not None:  # a panic of llguidance is no Exception
            return GrammarError(f"The grammar cannot be used: {error}")
        return pending.rows.result()[pending.row]


class StructuredOutput:
    """Compiles an engine's grammars and computes its masks. `close` ends its threads."""

    def __init__(self, model_folder: Path, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._folder, self._vocab_size, self._eos_token_ids = model_folder, vocab_size, eos_token_ids
        self._wanted: weakref.WeakValueDictionary[str, _Compilation] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[str, _Compilation] = OrderedDict()  # compiled, the latest used last
        self._compiled: deque[_Compilation] = deque()  # by the compiler's thread, not among `_kept` yet
        self._waiting: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._no_end = mask_without(vocab_size, eos_token_ids)
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._masker = ThreadPoolExecutor(1, "token-masks")
        self._slow_masker = ThreadPoolExecutor(1, "slow-token-masks")
        # Loaded before there are requests: it takes up to seconds, in most of which no other thread can run.
        self._tokenizer = self._compiler.submit(self._load_tokenizer)
        wait([self._tokenizer])

    @property
    def tokenizer(self) -> llguidance.LLTokenizer:
        """The model's tokenizer, as grammars use it. Raises `GrammarError` if the model has none that they can use."""
        return self._loaded.tokenizer

    @property
    def _loaded(self) -> _GrammarTokenizer:
        if (error := self._tokenizer.exception()) is not None:
            raise GrammarError(f"This model has no tokenizer that structured output can use: {error}")
        return self._tokenizer.result()

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
        elif compilation.order is None or (order < compilation.order and not compilation.compiled.done()):
            compilation.order = order
            self._waiting.put(_Waiting(order, next(self._numbers), weakref.ref(compilation)))
            self._compiler.submit(self._compile_next)
        return GrammarMatcher(compilation)

    def begin_masks(self, rows: list[tuple[GrammarMatcher, list[int]]]) -> None:
        """Begin to compute what each matcher allows after its new tokens. A late mask that is there now is kept."""
        rows = [row for row in rows if row[0].pending is None]
        quick = [row for row in rows if not row[0].is_slow]
        if quick:
            self._begin(self._masker, quick)
        for row in rows:
            if row[0].is_slow:
                self._begin(self._slow_masker, [row])

    def wait_masks(self, matchers: list[GrammarMatcher]) -> None:
        """Wait for the masks of these, but not for long."""
        wait({matcher.pending.rows for matcher in matchers if matcher.pending is not None}, _MAX_MASK_WAIT_S)

    def close(self) -> None:
        """End the threads, without waiting for a grammar that is being compiled."""
        for pool in (self._compiler, self._masker, self._slow_masker):
            pool.shutdown(wait=False, cancel_futures=True)

    @functools.cached_property
    def _executor(self) -> llguidance.LLExecutor:
        """Its threads run from when it is made, and most engines never need them."""
        return llguidance.LLExecutor(min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 1)))

    def _keep_compiled(self) -> None:
        while self._compiled:
            compilation = self._compiled.popleft()
            self._kept[compilation.grammar] = compilation
            if len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)

    def _begin(self, pool: ThreadPoolExecutor, rows: list[tuple[GrammarMatcher, list[int]]]) -> None:
        masks = pool.submit(self._compute_masks, rows)
        for row, (matcher, _) in enumerate(rows):
            matcher.pending = _PendingMask(masks, row)

    def _compute_masks(self, rows: list[tuple[GrammarMatcher, list[int]]]) -> list[TokenMask | Exception]:
        followed = [outcome_of(matcher.follow, new_ids) for matcher, new_ids in rows]
        masks = np.empty((len(rows), len(self._no_end)), dtype=np.int32)
        matchers = [(one, row) for row, one in enumerate(followed) if not isinstance(one, Exception)]
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.strides[0], len(rows))
        for matcher, row in matchers:
            if (error := error_of(_check_cost, matcher)) is not None:
                followed[row] = error
                continue
            if not matcher.is_accepting():  # an end token that is also a piece of text would cut the output
                masks[row] &= self._no_end
            rows[row][0].end_number(masks[row])
        return [one if isinstance(one, Exception) else masks[row] for row, one in enumerate(followed)]

    def _compile_next(self) -> None:
        compilation = self._waiting.get_nowait().compilation()
        if compilation is None or compilation.compiled.done():  # nobody waits for it, or it was asked for twice
            return
        compiled = outcome_of(self._compile, compilation.grammar)
        if isinstance(compiled, Exception):
            compilation.compiled.set_exception(compiled)
        else:
            compilation.compiled.set_result(compiled)
        self._compiled.append(compilation)

    def _compile(self, grammar: str) -> _Compiled:
        tokenizer, numbers = self._loaded
        with grammar_errors_only():
            matcher, probe = compile_grammar(tokenizer, grammar), compile_probe(tokenizer, grammar)
        return _Compiled(matcher, probe, numbers if writes_json(grammar) else None)

    def _load_tokenizer(self) -> _GrammarTokenizer:
        tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False, local_files_only=True)
        fast = tokenizer.backend_tokenizer
        fast.no_truncation()
        fast.no_padding()
        made = make_grammar_tokenizer(fast.to_str(), self._vocab_size, self._eos_token_ids)
        return _GrammarTokenizer(made, NumberTokens(fast.get_vocab(), self._vocab_size, made))


def _check_cost(matcher: llguidance.LLMatcher) -> None:
    """Raise `GrammarError` unless the matcher can go on. Its mask is there, and so are its forced bytes."""
    check_matcher(matcher)
    num_forced_bytes(matcher)

"""Structured output: which tokens a sequence's grammar allows next.

Masks of a step are computed in threads of their own while the step's forward runs. A sequence whose mask takes long
leaves its place in the steps until the mask is ready, so the others do not wait for it. Costly masks, which an
ambiguous grammar needs, share a budget: a part of the time that passes. Their sequences wait for it, and have no place
in the steps meanwhile. A grammar that is costly for many tokens ends its request.

A matcher is a function of its grammar and the output so far: a worker that takes over a sequence makes its own and lets
it follow the output, and so the tokens do not depend on where, or in which batch, they were computed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import llguidance
import numpy as np
from transformers import AutoTokenizer

from tandem.engine.number_tokens import NumberTokens, TokenMask, mask_without, writes_json
from tandem.protocol.grammar import (
    GrammarError,
    check_matcher,
    compile_grammar,
    compile_probe,
    grammar_errors_only,
    make_grammar_tokenizer,
    num_forced_bytes,
)

MAX_COMPILED = 64  # grammars that are kept: requests of one application share theirs
_MAX_THREADS = 8  # threads that compute masks
_MAX_RUN_BYTES = 512  # of a forced text whose tokens are found one by one: each time the rest of it is tokenized again
# Wait for masks after a step's forward. Most take less than a millisecond, but all cores may be busy.
_MAX_MASK_WAIT_S = 0.02

# CPU seconds of one token: its mask, and following the output. Ordinary grammars take 0.1 ms, at most 1 ms or so.
_COSTLY_S = 0.003
_BUDGET_SHARE = 0.25  # of the time that passes: for all costly masks together, while other sequences run
_MAX_SAVED_S = 0.05  # of the budget; more would make a step late that comes after a pause
# CPU seconds that an answer's grammar may take, beside those for each of its tokens. The first masks of a large grammar
# take up to 0.1 s. Those of an ambiguous grammar take longer with each token, until they take 0.4 s each.
_MAX_COST_S, _MAX_TOKEN_COST_S = 0.5, 0.01


class _Compiled(NamedTuple):
    """A grammar at its beginning."""

    matcher: llguidance.LLMatcher
    probe: llguidance.LLMatcher | None  # looks for forced tokens; None if the grammar is too large for that
    numbers: NumberTokens | None  # ends numbers that are too long; None if the grammar has no JSON


class _Compilation:
    """A grammar, and its compiled form once that exists. Its matchers keep it alive while it waits."""

    def __init__(self, grammar: str, root: bytes) -> None:
        self.grammar = grammar
        self.root = root
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


class MaskRequest(NamedTuple):
    """Tokens behind which a mask is wanted, and a draft behind each token of which one is wanted, too."""

    matcher: GrammarMatcher
    new_ids: list[int]  # behind those that the matcher has consumed
    draft: tuple[int, ...] = ()


class _PendingMask(NamedTuple):
    """A mask that is being computed: one row of those that are computed together. Those behind a draft follow it."""

    rows: Future[list[list[TokenMask] | GrammarError]]
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
        self.draft_masks: list[
            TokenMask
        ] = []  # behind the leading tokens of a draft, with the mask that was taken last
        self.draft_s = 0.0  # what all of them cost; it does not count against the grammar
        self.is_slow = False  # its last mask was late: the next one does not delay those of others
        self.unpaid_s = 0.0  # what its last token cost, until `MaskBudget` has it
        self.total_cost_s = 0.0
        self.turn_s = 0.0  # its place in the line for costly masks: the sum of those that it had
        self._is_late = False  # the pending mask
        self._token_cost_s = 0.0  # of the token whose mask is not there yet

    @property
    def is_ready(self) -> bool:
        """Whether the next token may be sampled: the grammar is compiled or unusable, and no mask is waited for."""
        if not self._compilation.compiled.done():
            return False
        return not self.is_costly if self.pending is None else self.pending.rows.done()

    @property
    def is_costly(self) -> bool:
        """Whether its last token cost so much that its next mask waits for the budget."""
        return self.unpaid_s > _COSTLY_S

    @property
    def may_look_ahead(self) -> bool:
        """Whether its masks are cheap, and no thread computes one now."""
        return self._matcher is not None and self.pending is None and not self.is_costly and not self.is_slow

    def num_allowed(self, draft: Seq[int]) -> int:
        """How many leading tokens of a draft may follow what it has consumed. It must be true that `may_look_ahead`."""
        assert self._matcher is not None, "it has consumed nothing"
        begun_s, num = time.thread_time(), 0
        with contextlib.suppress(GrammarError), grammar_errors_only():
            num = self._matcher.validate_tokens(list(draft))
        self.draft_s += time.thread_time() - begun_s
        return num

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

    def end_number(self, mask: TokenMask, draft: Seq[int] = ()) -> None:
        """End a number of JSON that is too long, in the mask that follows what it has consumed, and this draft."""
        numbers = self._compilation.compiled.result().numbers
        if numbers is not None:
            numbers.end_number(mask, numbers.run_after(self._number_run, draft) if draft else self._number_run)

    def forced_token(self, new_ids: list[int]) -> int | None:
        """The only token that may follow these ones, if that is known without the mask.

        The new tokens come after those that it has probed.

        llguidance finds bytes that are the only ones which fit, and cuts them into tokens as the tokenizer does. Its
        mask allows the first of these tokens and no other. The search has no bound of its own, so a probe makes it: a
        matcher of tight limits, which is given up when it reaches them.
        """
        begun_s = time.thread_time()
        forced = self._find_forced_token(new_ids)
        self._token_cost_s += time.thread_time() - begun_s
        return forced

    def is_complete(self, new_ids: list[int]) -> bool:
        """Whether nothing may follow these tokens. Raises `GrammarError`, as `follow` does."""
        begun_s = time.thread_time()
        is_stopped = bool(self.follow(new_ids).is_stopped())
        self._token_cost_s += time.thread_time() - begun_s
        return is_stopped

    def compute_mask(self, new_ids: list[int], mask: TokenMask, no_end: TokenMask) -> TokenMask:
        """Fill `mask` with what may follow these tokens. Raises `GrammarError`."""
        begun_s = time.thread_time()
        with grammar_errors_only():
            _fill_mask(self.follow(new_ids), mask, no_end)
            self.end_number(mask)
        self._note_cost(self._token_cost_s + time.thread_time() - begun_s)
        return mask

    def compute_draft_masks(self, draft: Seq[int], no_end: TokenMask) -> list[TokenMask]:
        """Masks behind each token of a draft. They end where it does not fit, or costs more than a cheap mask may.

        A `GrammarError` behind a drafted token is left to the step in which that token has come.
        """
        begun_s, masks = time.thread_time(), list[TokenMask]()
        if draft and self._matcher is not None:
            ahead = self._matcher.deep_copy()
            with contextlib.suppress(GrammarError), grammar_errors_only():
                for num, token_id in enumerate(draft, 1):
                    ahead.consume_tokens([token_id])
                    if ahead.is_stopped() or time.thread_time() - begun_s > _COSTLY_S:
                        break
                    mask = _fill_mask(ahead, np.empty_like(no_end), no_end)
                    self.end_number(mask, draft[:num])
                    masks.append(mask)
        self.draft_s += time.thread_time() - begun_s
        return masks

    def take_mask(self) -> TokenMask | Exception | None:
        """The mask that was begun last, or why there is none; None while it is computed."""
        pending = self.pending
        assert pending is not None, "no mask was begun"
        if not pending.rows.done():
            self.is_slow = self._is_late = True
            return None
        self.pending = None
        self.is_slow, self._is_late = self._is_late, False
        masks = pending.rows.result()[pending.row]
        if isinstance(masks, GrammarError):
            return masks
        self.draft_masks = masks[1:]
        return masks[0]

    def _find_forced_token(self, new_ids: list[int]) -> int | None:
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

    def _note_cost(self, cost_s: float) -> None:
        """The mask after a token is ready, so its cost is known. Raises `GrammarError` if the answer costs too much."""
        self._token_cost_s, self.unpaid_s = 0.0, cost_s
        self.total_cost_s += cost_s
        if self.total_cost_s > _MAX_COST_S + _MAX_TOKEN_COST_S * self.num_consumed:
            raise GrammarError(
                f"The grammar costs too much: {self.total_cost_s:.1f} s of computing for {self.num_consumed} tokens. "
                "Make it less ambiguous: each text should have one derivation."
            )


class MaskBudget:
    """CPU seconds for costly masks. A matcher pays for its last mask before the next one is begun."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen_s = clock()
        self._left_s = _MAX_SAVED_S
        self._turn_s = 0.0  # of the matcher that paid last

    def take(self, matchers: list[GrammarMatcher], *, is_limited: bool) -> list[GrammarMatcher]:
        """Those of the matchers that may go on now. Among those that wait, the one that has paid least is next."""
        now = self._clock()
        self._left_s = min(self._left_s + (now - self._seen_s) * _BUDGET_SHARE, _MAX_SAVED_S)
        self._seen_s = now
        taken: list[GrammarMatcher] = []
        for matcher in sorted(matchers, key=lambda one: one.turn_s):
            if is_limited and self._left_s <= 0:
                break
            self._turn_s = max(matcher.turn_s, self._turn_s)
            matcher.turn_s, unpaid_s, matcher.unpaid_s = self._turn_s + matcher.unpaid_s, matcher.unpaid_s, 0.0
            self._left_s -= unpaid_s if is_limited else 0.0
            taken.append(matcher)
        return taken


class StructuredOutput:
    """Compiles an engine's grammars and computes its masks. `close` ends its threads."""

    def __init__(
        self,
        model_folder: Path,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._vocab_size, self._eos_token_ids = model_folder, vocab_size, eos_token_ids
        self._wanted: weakref.WeakValueDictionary[tuple[bytes, str], _Compilation] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[tuple[bytes, str], _Compilation] = OrderedDict()  # compiled, the latest used last
        self._compiled: deque[_Compilation] = deque()  # by the compiler's thread, not among `_kept` yet
        self._waiting: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._no_end = mask_without(vocab_size, eos_token_ids)
        self._compiler = ThreadPoolExecutor(1, "grammar-compiler")
        self._num_maskers = min(_MAX_THREADS, max((os.cpu_count() or 1) // 2, 1))
        self._masker = ThreadPoolExecutor(self._num_maskers, "token-masks")
        self._slow_masker = ThreadPoolExecutor(1, "slow-token-masks")
        self._budget = MaskBudget(clock)
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

    def matcher(self, grammar: str, order: float = 0.0, root: bytes = b"") -> GrammarMatcher:
        """A matcher at the grammar's beginning, which is compiled in the background, the smallest `order` first.

        Sequences of one root share what is compiled: the time that it takes would tell others who has used a grammar.
        A grammar that waits for the compiler is dropped once nobody refers to a matcher of it.
        """
        self._keep_compiled()
        compilation = self._wanted.get((root, grammar))
        if compilation is None:
            compilation = self._wanted[root, grammar] = _Compilation(grammar, root)
        if (root, grammar) in self._kept:
            self._kept.move_to_end((root, grammar))
        elif compilation.order is None or (order < compilation.order and not compilation.compiled.done()):
            compilation.order = order
            self._waiting.put(_Waiting(order, next(self._numbers), weakref.ref(compilation)))
            self._compiler.submit(self._compile_next)
        return GrammarMatcher(compilation)

    def begin_masks(self, rows: list[MaskRequest]) -> None:
        """Begin to compute what each matcher allows after its new tokens. A late mask that has arrived is kept."""
        rows = [row for row in rows if row.matcher.pending is None]
        quick = [row for row in rows if not row.matcher.is_slow]
        for number in range(min(self._num_maskers, len(quick))):
            self._begin(self._masker, quick[number :: self._num_maskers])
        for row in rows:
            if row.matcher.is_slow:
                self._begin(self._slow_masker, [row])

    def begin_costly_masks(self, rows: list[tuple[GrammarMatcher, list[int]]], *, is_limited: bool) -> None:
        """Begin to compute masks for which matchers wait, as many as the budget allows, or all if nobody is delayed."""
        new_ids = dict(rows)
        for matcher in self._budget.take(list(new_ids), is_limited=is_limited):
            self._begin(self._slow_masker, [MaskRequest(matcher, new_ids[matcher])])

    def wait_masks(self, matchers: list[GrammarMatcher]) -> None:
        """Wait for the masks of these, but not for long."""
        wait({matcher.pending.rows for matcher in matchers if matcher.pending is not None}, _MAX_MASK_WAIT_S)

    def close(self) -> None:
        """End the threads, without waiting for a grammar that is being compiled."""
        for pool in (self._compiler, self._masker, self._slow_masker):
            pool.shutdown(wait=False, cancel_futures=True)

    def _keep_compiled(self) -> None:
        while self._compiled:
            compilation = self._compiled.popleft()
            self._kept[compilation.root, compilation.grammar] = compilation
            if len(self._kept) > MAX_COMPILED:
                self._kept.popitem(last=False)

    def _begin(self, pool: ThreadPoolExecutor, rows: list[MaskRequest]) -> None:
        masks = pool.submit(self._compute_masks, rows)
        for row, request in enumerate(rows):
            request.matcher.pending = _PendingMask(masks, row)

    def _compute_masks(self, rows: list[MaskRequest]) -> list[list[TokenMask] | GrammarError]:
        masks = np.empty((len(rows), len(self._no_end)), dtype=np.int32)
        return [self._masks_of(request, mask) for request, mask in zip(rows, masks, strict=True)]

    def _masks_of(self, request: MaskRequest, mask: TokenMask) -> list[TokenMask] | GrammarError:
        matcher, new_ids, draft = request
        try:
            first = matcher.compute_mask(new_ids, mask, self._no_end)
        except GrammarError as exc:
            return exc
        return [first, *matcher.compute_draft_masks(draft, self._no_end)]

    def _compile_next(self) -> None:
        compilation = self._waiting.get_nowait().compilation()
        if compilation is None or compilation.compiled.done():  # nobody waits for it, or it was asked for twice
            return
        try:
            compilation.compiled.set_result(self._compile(compilation.grammar))
        except GrammarError as exc:
            compilation.compiled.set_exception(exc)
        self._compiled.append(compilation)

    def _compile(self, grammar: str) -> _Compiled:
        with grammar_errors_only():
            tokenizer, numbers = self._loaded
            matcher, probe = compile_grammar(tokenizer, grammar), compile_probe(tokenizer, grammar)
            return _Compiled(matcher, probe, numbers if writes_json(grammar) else None)

    def _load_tokenizer(self) -> _GrammarTokenizer:
        tokenizer = AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False, local_files_only=True)
        fast = tokenizer.backend_tokenizer
        fast.no_truncation()
        fast.no_padding()
        made = make_grammar_tokenizer(fast.to_str(), self._vocab_size, self._eos_token_ids)
        return _GrammarTokenizer(made, NumberTokens(fast.get_vocab(), self._vocab_size, made))


def _fill_mask(matcher: llguidance.LLMatcher, mask: TokenMask, no_end: TokenMask) -> TokenMask:
    """Fill `mask` with what may follow what a matcher has consumed. Raises `GrammarError`."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    check_matcher(matcher)
    num_forced_bytes(matcher)
    if not matcher.is_accepting():  # an end token that is also a piece of text would cut the output
        mask &= no_end
    return mask

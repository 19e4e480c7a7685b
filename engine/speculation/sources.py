"""Texts in which drafts are looked for: a sequence's own, its prediction, recent answers of its cache scope."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableSequence
from collections.abc import Sequence as Seq

from tandem.engine.speculation.acceptance import Acceptance
from tandem.engine.speculation.token_index import MAX_MATCH, SEPARATOR, Match, TokenIndex
from tandem.engine.token_array import token_array

_MAX_TOKENS = 1 << 18  # of all recent answers: some 35 MB
_SCOPE_TOKENS = 1 << 16  # of one scope
_MAX_SCOPES = 1024
_NO_TOKENS: tuple[int, ...] = ()


class ScopeAnswers:
    """Recent answers of one cache scope. Half of them are forgotten at once when they are too many."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self.indexes: list[TokenIndex] = []  # at most two, the newer one first

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(len(index.tokens) for index in self.indexes)

    def add(self, tokens: Seq[int]) -> None:
        """Keep one more answer, and the end of its prompt before it."""
        tokens = [SEPARATOR, *tokens[-_SCOPE_TOKENS // 2 :]]
        if not self.indexes or len(self.indexes[0].tokens) + len(tokens) > _SCOPE_TOKENS // 2:
            self.indexes = [TokenIndex(token_array()), *self.indexes[:1]]
        self.indexes[0].tokens.extend(tokens)


class RecentAnswers:
    """The recent answers of all scopes. The scope that was used longest ago is forgotten first."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[bytes, ScopeAnswers] = OrderedDict()

    def __len__(self) -> int:
        """How many scopes are remembered."""
        return len(self._scopes)

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept."""
        return sum(scope.num_tokens for scope in self._scopes.values())

    def of(self, root: bytes) -> ScopeAnswers:
        """Those of the scope with this root of digests."""
        scope = self._scopes.setdefault(root, ScopeAnswers())
        self._scopes.move_to_end(root)
        if len(self._scopes) > _MAX_SCOPES:
            self._scopes.popitem(last=False)
        return scope

    def add(self, root: bytes, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        """Keep an answer, and the end of its prompt, which matches where the next answer begins."""
        self.of(root).add(token_ids[max(num_prompt_tokens - MAX_MATCH, 0) :])
        while len(self._scopes) > 1 and self.num_tokens > _MAX_TOKENS:
            self._scopes.popitem(last=False)


class RequestTexts:
    """The texts of a request that all answers to its prompt share."""

    def __init__(self, prompt: MutableSequence[int], prediction: Seq[int]) -> None:
        self.prompt = TokenIndex(prompt)
        # The end of the prompt matches where the answer begins.
        self.prediction = TokenIndex([*prompt[-MAX_MATCH:], *prediction]) if prediction else None

    @property
    def num_indexed(self) -> int:
        """Tokens in which drafts are searched so far."""
        return self.prompt.num_indexed + (0 if self.prediction is None else self.prediction.num_indexed)


class DraftSources:
    """Where the drafts of one sequence come from, and how good they were."""

    def __init__(self, token_ids: MutableSequence[int], texts: RequestTexts, answers: ScopeAnswers) -> None:
        """`token_ids` belongs to the sequence: it begins with the prompt of the texts, and grows with its answer."""
        self.acceptance = Acceptance(answers.acceptance)
        self.drafted: Seq[int] = _NO_TOKENS  # what was expected behind the first `_num_seen` tokens
        self.is_predicted = False  # whether that was the request's prediction
        self._length = 0  # of the match that it came from
        self._num_seen = len(token_ids)
        self._answers = answers
        self._texts = texts
        self._text = TokenIndex(token_ids, max(len(texts.prompt.tokens) - MAX_MATCH, 0))

    @property
    def num_indexed(self) -> int:
        """Tokens of its own text and of the prediction in which drafts are searched so far."""
        return self._text.num_indexed + self._texts.num_indexed

    def propose(self, token_ids: Seq[int], most: int, least_share: float, max_grams: int) -> list[float]:
        """Expect at most this many tokens behind these, all that a sequence has: see `drafted`.

        Returns for each of them, down to `least_share`, the probability that it and all before it come. Learns from
        what came meanwhile. Of each text the next `max_grams` tokens are indexed.
        """
        if self.drafted:
            self.acceptance.observe(self._length, self.drafted, token_ids[self._num_seen :])
        self._num_seen = len(token_ids)
        match = self._find(token_ids[-MAX_MATCH:], max_grams)
        self.drafted = _NO_TOKENS if match is None else match.draft(most)
        shares: list[float] = []
        if match is not None:
            prediction = self._texts.prediction
            self.is_predicted = prediction is not None and match.tokens is prediction.tokens
            self._length, share = match.length, 1.0
            for ahead in range(len(self.drafted)):
                share *= self.acceptance.share(match.length + ahead)
                if share < least_share:
                    break
                shares.append(share)
        return shares

    def _find(self, tail: Seq[int], max_grams: int) -> Match | None:
        """The longest match; of equally long ones that of the prediction, then that of its own text."""
        texts, best = self._texts, None
        for index in (texts.prediction, self._text, texts.prompt, *self._answers.indexes):
            if index is None:
                continue
            index.extend(len(index.tokens), max_grams)
            match = index.find(tail)
            if match is not None and (best is None or match.length > best.length):
                best = match
        if best is not None and best.tokens is texts.prompt.tokens:
            return best._replace(tokens=self._text.tokens)  # the answer follows
        return best

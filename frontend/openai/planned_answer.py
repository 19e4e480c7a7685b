"""A checked and tokenized request, the input of `answer_request`, and what an API's format makes of its answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tandem.frontend.http.answer_shapes import Error
from tandem.frontend.openai.answer_shapes import (
    CompletionTokensDetails,
    EndReason,
    PromptTokensByRole,
    RoleTokens,
    Usage,
)
from tandem.frontend.openai.cache_hints import Hints
from tandem.frontend.openai.choice_text import ChoiceDelta, ChoicePlan
from tandem.frontend.openai.logprobs import TokenEntry
from tandem.frontend.openai.prompt_roles import RoleSpan, tokens_by_role
from tandem.text.tool_calls.events import Event, content_events


@dataclass(slots=True)
class TokensUsed:
    """Tokens that a request has used so far. A prompt counts once, even if several choices share it."""

    num_prompt_tokens: int
    has_reasoning: bool = False  # whether reasoning is separated from content, and counted
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0  # how many tokens of the completion are reasoning
    has_prediction: bool = False
    num_accepted_tokens: int = 0  # of the prediction
    num_rejected_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: Counter[str] = field(default_factory=Counter)  # cached, but not in the pool, by tier
    roles: Sequence[RoleSpan] = ()  # of the prompt, if they are to be shown

    def add(self, delta: ChoiceDelta) -> None:
        """Count one delta of any choice."""
        self.num_completion_tokens += delta.num_tokens
        self.num_reasoning_tokens += delta.num_reasoning_tokens
        self.num_accepted_tokens += delta.num_accepted_tokens
        self.num_rejected_tokens += delta.num_rejected_tokens
        if delta.num_cached_tokens:
            self.num_cached_tokens += delta.num_cached_tokens
            self.num_loaded_tokens.update(delta.num_loaded_tokens or {})

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """The cached tokens by where they were: the worker's pool, a tier below it, or a peer."""
        loaded = {tier: num for tier, num in self.num_loaded_tokens.items() if num}
        num_in_pool = self.num_cached_tokens - sum(loaded.values())
        return ({"pool": num_in_pool} if num_in_pool > 0 else {}) | loaded

    def shown(self) -> Usage:
        """OpenAI's usage object."""
        has_prediction = self.has_prediction
        details = CompletionTokensDetails(
            reasoning_tokens=self.num_reasoning_tokens if self.has_reasoning else UNSET,
            accepted_prediction_tokens=self.num_accepted_tokens if has_prediction else UNSET,
            rejected_prediction_tokens=self.num_rejected_tokens if has_prediction else UNSET,
        )
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=self.num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptTokensByRole(self.num_cached_tokens, self.cached_by_tier, self._by_role()),
            completion_tokens_details=details if self.has_reasoning or has_prediction else UNSET,
        )

    def _by_role(self) -> dict[str, RoleTokens] | UnsetType:
        by_role = tokens_by_role(self.roles, self.num_cached_tokens)
        return {role: RoleTokens(*numbers) for role, numbers in by_role.items()} if by_role else UNSET


@dataclass(slots=True)
class FinishedChoice:
    """A choice joined from its deltas, for a plain answer."""

    index: int
    finish_reason: EndReason | None = None
    stop_reason: str | int | None = None
    entries: list[TokenEntry] = field(default_factory=list)
    events: list[Event] | None = None  # None = all text is content
    token_ids: list[int] | None = None  # None = they are not shown
    _texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its whole text."""
        return "".join(self._texts)

    @property
    def end_reason(self) -> EndReason:
        """Why it ended."""
        assert self.finish_reason is not None, f"choice {self.index} has not ended"
        return self.finish_reason

    @property
    def parts(self) -> list[Event]:
        """What its text consists of, whether it was parsed or not."""
        return content_events(self.text) if self.events is None else self.events

    def add(self, delta: ChoiceDelta) -> None:
        """Append one delta of this choice."""
        self._texts.append(delta.text)
        if delta.events is not None:
            self.events = self.events or []
            self.events += delta.events
        self.entries += delta.entries
        if delta.token_ids is not None:
            self.token_ids = (self.token_ids or []) + delta.token_ids
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason


class AnswerEvents(Protocol):
    """Makes the server-sent events of one answer."""

    def of(self, delta: ChoiceDelta) -> bytes:
        """The events for one delta, maybe none."""

    async def ending(self) -> bytes:
        """The last events of a complete answer."""

    def error(self, body: Error) -> bytes:
        """The last event of an answer that failed; `body` is that of an error response."""


class AnswerFormat(Protocol):
    """Makes the answers of one API."""

    id_prefix: str
    prompt_field: str  # request field with the prompt

    def body(self, answer: PlannedAnswer, choices: list[FinishedChoice], usage: TokensUsed) -> msgspec.Struct:
        """A plain answer."""

    def events(self, answer: PlannedAnswer) -> AnswerEvents:
        """The events of a streamed answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """What to generate for a request and how to present it."""

    request_id: str  # as the client and the log see it
    answer_id: str
    model: str
    arrived_s: float
    format: AnswerFormat
    choices: list[ChoicePlan]
    num_prompt_tokens: int
    is_stream: bool = False
    has_usage: bool = False
    has_running_usage: bool = False
    hints: Hints = ()
    roles: Sequence[RoleSpan] = ()

    @property
    def shows_token_ids(self) -> bool:
        """Whether the token ids of prompts and answers are shown."""
        return self.choices[0].shows_token_ids

    def new_usage(self) -> TokensUsed:
        """The usage of this answer before its first token."""
        has_reasoning = any(choice.parsing is not None and choice.parsing.has_reasoning for choice in self.choices)
        has_prediction = bool(self.choices[0].request.sampling.prediction)
        return TokensUsed(self.num_prompt_tokens, has_reasoning, has_prediction=has_prediction, roles=self.roles)

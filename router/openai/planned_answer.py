"""What a request asks for, checked and tokenized: the input of `answer_request`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from tandem.router.openai.choice_text import ChoicePlan
from tandem.router.openai.formats import AnswerFormat

__all__ = ["PlannedAnswer", "new_answer_id"]


def new_answer_id(prefix: str) -> str:
    """A fresh id, from which the request ids of the choices are derived."""
    return prefix + secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedAnswer:
    """What to generate for a request and how to present it."""

    answer_id: str
    model: str
    arrived_s: float
    format: AnswerFormat
    choices: list[ChoicePlan]
    num_prompt_tokens: int
    is_stream: bool = False
    has_usage: bool = False
    has_running_usage: bool = False

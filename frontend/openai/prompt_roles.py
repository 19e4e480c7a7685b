"""The prompt of a chat by the roles of its messages: which part of a conversation the cache holds, and which it lost.

A message has the tokens from the end of the one before it: what the template writes ahead of it, such as tools or a
system prompt of its own, counts with it. What follows the last message begins the answer: it is the assistant's.

    <|im_start|>system\\nBe brief.<|im_end|>\\n<|im_start|>user\\nHi!<|im_end|>\\n<|im_start|>assistant\\n
    |--------------- system ----------------||------------- user -------------||------ assistant ------|
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from tandem.protocol.errors import RequestError
from tandem.text.tokenizer import Tokenizer

MAX_MESSAGES = 200  # each change of role renders the messages up to it once more


class RoleSpan(NamedTuple):
    """Consecutive tokens of one role, up to token number `end`."""

    role: str
    end: int


def role_spans(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    roles: Sequence[str],
    options: dict[str, Any],
    *,
    add_special_tokens: bool,
) -> list[RoleSpan]:
    """The spans of a conversation, of messages as the template takes them. Raises `RequestError` as rendering does.

    The end of a role is where the text of the messages up to it ends. Where a template refuses these or writes them in
    another way, such as without the thoughts of earlier turns, their tokens count with the next role.
    """
    text = tokenizer.render_chat(list(messages), options)
    ends = tokenizer.token_ends(text, add_special_tokens=add_special_tokens)
    options = options | {"add_generation_prompt": False, "continue_final_message": False}
    spans, count = list[RoleSpan](), 0
    for role, run in groupby(roles):
        count += len(list(run))
        part = _rendered(tokenizer, messages[:count], options)
        if part is None or not text.startswith(part):
            continue
        end = bisect_right(ends, len(part))
        if not spans or end >= spans[-1].end:  # some templates write less for more messages
            spans.append(RoleSpan(role, end))
    if not spans or spans[-1].end < len(ends):
        spans.append(RoleSpan("assistant", len(ends)))
    return spans


def _rendered(tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], options: dict[str, Any]) -> str | None:
    try:
        return tokenizer.render_chat(list(messages), options)
    except RequestError:
        return None


def tokens_by_role(spans: Sequence[RoleSpan], num_cached_tokens: int) -> dict[str, tuple[int, int]]:
    """By role its tokens, and those of them that were among the prompt's first `num_cached_tokens`."""
    tokens, cached, start = Counter[str](), Counter[str](), 0
    for role, end in spans:
        tokens[role] += end - start
        cached[role] += max(min(end, num_cached_tokens) - start, 0)
        start = end
    return {role: (num, cached[role]) for role, num in tokens.items()}

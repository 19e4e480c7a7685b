"""Context management: takes old results of tools and old thoughts out of a conversation before the model reads it.

Pure, apart from a function that counts tokens. An edit is a hint about length: one that is not known here is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tandem.frontend.http.ignored_fields import note_ignored
from tandem.frontend.messages.schema import ContentBlock, ContextEdit, CountTokensRequest, InputMessage, Quantity

CLEARED = "[Old tool result content cleared]"  # in the place of a result; Claude Code writes the same
TOOL_USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
DEFAULT_TRIGGER, DEFAULT_TOOL_USES, DEFAULT_TURNS = 100_000, 3, 1  # as in Anthropic's API

Messages = Sequence[InputMessage]
Json = dict[str, Any]


class Edited(NamedTuple):
    """A conversation after its edits, and what the answer says of each that cleared something."""

    messages: Messages
    applied: list[Json]

    @property
    def num_cleared_tokens(self) -> int:
        """The tokens that all edits cleared."""
        return sum(edit["cleared_input_tokens"] for edit in self.applied)


class _Cleared(NamedTuple):
    """A conversation after one edit: how many uses or turns were cleared, and their text."""

    messages: Messages
    number: int
    text: str


def known_edits(request: CountTokensRequest) -> list[ContextEdit]:
    """The edits of a request that can be made; the others are noted as ignored."""
    management = request.context_management
    known: list[ContextEdit] = []
    for edit in (management.edits or ()) if management is not None else ():
        if edit.type in (TOOL_USES, THINKING):
            known.append(edit)
        else:
            note_ignored(f"context_management.{edit.type}")
    return known


def least_trigger(edits: Sequence[ContextEdit]) -> int | None:
    """The fewest tokens of a prompt that trigger one of these edits; None if none depends on tokens."""
    triggers = [_trigger(edit) for edit in edits if edit.type == TOOL_USES]
    return min((one.value for one in triggers if one.type != "tool_uses"), default=None)


def edited(messages: Messages, edits: Sequence[ContextEdit], num_tokens: float, count: Callable[[str], int]) -> Edited:
    """The conversation after these edits. `num_tokens` is the length of the prompt, `count` that of a text."""
    applied: list[Json] = []
    for edit in edits:
        is_thinking = edit.type == THINKING
        done = _thoughts_cleared(messages, edit) if is_thinking else _results_cleared(messages, edit, num_tokens)
        num_cleared = count(done.text) if done.number else 0
        at_least = edit.clear_at_least
        if not done.number or (at_least is not None and num_cleared < at_least.value):
            continue
        messages = done.messages
        what = "cleared_thinking_turns" if is_thinking else "cleared_tool_uses"
        applied.append({"type": edit.type, what: done.number, "cleared_input_tokens": num_cleared})
    return Edited(messages, applied)


# -- thoughts


def _thoughts_cleared(messages: Messages, edit: ContextEdit) -> _Cleared:
    """Clears the thoughts of all turns but the last ones. A turn goes on over the results of its tools."""
    num_kept = _number(edit.keep, DEFAULT_TURNS)
    turns: list[list[int]] = [[]]  # of each turn the messages with thoughts
    for i, message in enumerate(messages):
        blocks = _blocks(message)
        if message.role == "user" and not any(block.type == "tool_result" for block in blocks):
            turns.append([])
        elif any(block.type == "thinking" for block in blocks):
            turns[-1].append(i)
    turns = [turn for turn in turns if turn]
    old = [] if num_kept is None else turns[: max(0, len(turns) - num_kept)]
    at = {i for turn in old for i in turn}
    texts = [block.thinking or "" for i in sorted(at) for block in _blocks(messages[i]) if block.type == "thinking"]
    shown = [_without_thoughts(message) if i in at else message for i, message in enumerate(messages)]
    return _Cleared(shown, len(old), "\n".join(texts))


def _without_thoughts(message: InputMessage) -> InputMessage:
    kept = [block for block in _blocks(message) if block.type not in ("thinking", "redacted_thinking")]
    return msgspec.structs.replace(message, content=kept)


# -- results of tools


def _results_cleared(messages: Messages, edit: ContextEdit, num_tokens: float) -> _Cleared:
    """Clears the results of all uses of tools but the last ones, from the trigger on."""
    uses = {
        block.id: block.name for message in messages for block in _blocks(message) if block.type == "tool_use"
    }  # by the id of the call, in order
    trigger = _trigger(edit)
    if (len(uses) if trigger.type == "tool_uses" else num_tokens) < trigger.value:
        return _Cleared(messages, 0, "")
    num_kept = _number(edit.keep, DEFAULT_TOOL_USES)
    ids = [call_id for call_id, name in uses.items() if name not in (edit.exclude_tools or ())]
    clearing = _Clearing(set(ids if num_kept == 0 else ids[:-num_kept] if num_kept else ()), edit.clear_tool_inputs)
    return clearing.of(messages)


class _Clearing:
    """Clears the uses of tools with these ids that were not cleared before."""

    def __init__(self, ids: set[str | None], inputs: bool | list[str] | None) -> None:
        self._ids = ids
        self._inputs = inputs
        self._texts: list[str] = []
        self._cleared: set[str | None] = set()

    def of(self, messages: Messages) -> _Cleared:
        """The messages without what is cleared."""
        shown = [self._message(message) for message in messages]
        return _Cleared(shown, len(self._cleared), "\n".join(self._texts))

    def _message(self, message: InputMessage) -> InputMessage:
        if isinstance(message.content, str) or not message.content:
            return message
        return msgspec.structs.replace(message, content=[self._block(block) for block in message.content])

    def _block(self, block: ContentBlock) -> ContentBlock:
        if block.type == "tool_result" and block.tool_use_id in self._ids and block.content not in (None, "", CLEARED):
            self._cleared.add(block.tool_use_id)
            self._texts += _texts(block)
            return msgspec.structs.replace(block, content=CLEARED)
        if block.type == "tool_use" and block.id in self._ids and block.input and self._clears_input(block.name):
            self._texts.append(msgspec.json.encode(block.input).decode())
            return msgspec.structs.replace(block, input={})
        return block

    def _clears_input(self, name: str | None) -> bool:
        return name in self._inputs if isinstance(self._inputs, list) else bool(self._inputs)


def _texts(result: ContentBlock) -> Iterator[str]:
    if isinstance(result.content, str):
        yield result.content
    elif isinstance(result.content, list):
        yield from (block.text or "" for block in result.content)


def _trigger(edit: ContextEdit) -> Quantity:
    return edit.trigger or Quantity("input_tokens", DEFAULT_TRIGGER)


def _number(keep: Quantity | str | None, default: int) -> int | None:
    """How many of the latest are kept; None means all."""
    if keep is None:
        return default
    return None if isinstance(keep, str) or keep.type == "all" else keep.value


def _blocks(message: InputMessage) -> Sequence[ContentBlock]:
    return message.content if isinstance(message.content, list) else ()

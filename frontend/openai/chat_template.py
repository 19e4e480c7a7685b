"""What the model's chat template shows and how it wants messages: found when the server starts, by its text and by
rendering a conversation with a tool call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import RequestError
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.prompt import with_single_calls

_OBJECT, _TEXT, _AS_PYTHON = {"city": "Rome"}, '{"city": "Rome"}', "{'city': 'Rome'}"

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """One chat template."""

    shows_tools: bool  # it shows the tools of a request
    shows_calls: bool  # it shows the calls that the model made before
    refuses_roles: bool  # it may refuse a system message
    shows_later_system: bool  # it shows a system message that is not the first message
    takes_argument_texts: bool  # it shows the arguments of calls only if they are JSON text
    takes_single_calls: bool  # it refuses a message with several calls
    refuses_reasoning: bool  # it refuses a message with calls, content and reasoning

    def adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that it takes."""
        shown = with_single_calls(messages) if self.takes_single_calls else list(messages)
        return [_with_one_text(message) for message in shown] if self.refuses_reasoning else shown


def template_traits(tokenizer: Tokenizer) -> TemplateTraits:
    """What the tokenizer's chat template shows and takes."""
    template = tokenizer.chat_template
    shown = _ShownCalls(tokenizer)
    return TemplateTraits(
        shows_tools="tools" in template,
        shows_calls="tool_calls" in template and shown.has_calls(),
        refuses_roles="raise_exception" in template,
        shows_later_system=_shows_later_system(tokenizer),
        takes_argument_texts=shown.takes_argument_texts(),
        takes_single_calls=shown.takes_single_calls(),
        refuses_reasoning=shown.refuses_reasoning(),
    )


def _shows_later_system(tokenizer: Tokenizer) -> bool:
    """Some templates refuse a system message that comes later, and some leave it out. Claude Code sends one."""
    beginning: list[Message] = [{"role": "user", "content": "Hello"}, {"role": "system", "content": "weather"}]
    middle: list[Message] = [*beginning, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go."}]
    return all("weather" in _rendered(tokenizer, messages) for messages in (beginning, middle))


def _rendered(tokenizer: Tokenizer, messages: list[Message]) -> str:
    """The rendered conversation; empty if the template refuses it, or there is none."""
    if not tokenizer.chat_template:
        return ""
    try:
        return tokenizer.render_chat(messages, {"add_generation_prompt": True})
    except RequestError:
        return ""


class _ShownCalls:
    """How a chat template shows calls, found by rendering some."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def has_calls(self) -> bool:
        """Whether it shows calls. Some do so only beside null content, which transformers cannot pass."""
        return any("weather" in self._text([one]) for one in (_OBJECT, _TEXT))

    def takes_argument_texts(self) -> bool:
        """Most templates write an object as JSON. Some join it to a string, which fails, or show it as Python does."""
        by_object = self._text([_OBJECT])
        return (not by_object or _AS_PYTHON in by_object) and _TEXT in self._text([_TEXT])

    def takes_single_calls(self) -> bool:
        """Some templates refuse a message with several calls."""
        return any(self._text([one]) and not self._text([one, one]) for one in (_OBJECT, _TEXT))

    def refuses_reasoning(self) -> bool:
        """The template of gpt-oss refuses reasoning beside content, which it would show as reasoning too."""
        texts = {"content": "I look.", "reasoning_content": "Why?"}
        return any(self._text([one]) and not self._text([one], **texts) for one in (_OBJECT, _TEXT))

    def _text(self, arguments: Sequence[Any], **texts: str) -> str:
        """A rendered conversation with a call for each of these arguments; empty if there is none, or it refuses."""
        calls: list[Message] = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": "weather", "arguments": one}}
            for i, one in enumerate(arguments)
        ]
        messages: list[Message] = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "", "tool_calls": calls, **texts},
            *({"role": "tool", "tool_call_id": call["id"], "content": "sunny"} for call in calls),
        ]
        return _rendered(self._tokenizer, messages)


def _with_one_text(message: Message) -> Message:
    """A message with calls whose content is moved to the end of its reasoning."""
    reasoning, content = message.get("reasoning_content"), message.get("content")
    if not message.get("tool_calls") or not reasoning or not content:
        return message
    both = f"{reasoning}\n{content}"
    return {**message, "content": "", "reasoning_content": both, "reasoning": both}

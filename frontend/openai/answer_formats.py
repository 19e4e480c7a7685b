"""How the served model shows tools, writes calls and reasons: chosen once, when the server starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from tandem.frontend.openai.chat_template import TemplateTraits, template_traits
from tandem.frontend.openai.tool_fields import RequestedTools
from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import RequestError
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.formats import TOOL_FORMATS, ToolFormat, detect_tool_format
from tandem.text.tool_calls.grammar import tool_call_grammar
from tandem.text.tool_calls.parser import AnswerParser
from tandem.text.tool_calls.prompt import (
    TEXT_FORMATS,
    with_calls_as_text,
    with_system_as_user,
    with_tools_as_text,
)
from tandem.text.tool_calls.reasoning import REASONING_FORMATS, ReasoningFormat, detect_reasoning_format
from tandem.text.tool_calls.response_template import ResponseTemplateParser, load_template

PROMPT_END_TOKENS = 64  # tokens at a prompt's end that may open the reasoning

Parser = AnswerParser | ResponseTemplateParser


class ContinuedPart(NamedTuple):
    """The part of the last message that the answer continues."""

    field: str  # `content` or `reasoning_content`
    text: str


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How the choices of one request are parsed."""

    new_parser: Callable[[], Parser]
    special_ids: frozenset[int] = frozenset()  # special tokens that the parser must see
    marks: Mapping[int, str] = field(default_factory=dict)  # those whose places it must know, and their texts
    has_reasoning: bool = False  # whether it tells reasoning from content


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats of one model."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    template: Any  # the checkpoint's response template, instead of both; None = not used
    traits: TemplateTraits
    shows_calls: bool  # whether the chat template shows the model's earlier calls, in this format
    call_ids: frozenset[int] = frozenset()  # tokens that only calls have, as far as markers of calls are tokens

    def check_tools(self, tools: RequestedTools | None) -> None:
        """Raise `RequestError` if these tools cannot be served."""
        if tools is not None and self.tools is None and self.template is None:
            raise RequestError(
                "'tools' are not supported: the format in which this model writes tool calls is unknown. Start the "
                "server with --tool-parser, or send tool_choice 'none'.",
                param="tools",
                code="unsupported_parameter",
            )

    def rendered(
        self, messages: list[dict[str, Any]], tools: RequestedTools | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The messages for the chat template, and its variables about tools."""
        if not self.traits.shows_later_system:
            messages = with_system_as_user(messages)
        messages = self.traits.adapted(messages) if self.shows_calls else with_calls_as_text(messages)
        if tools is None:
            return messages, {}
        if self.traits.shows_tools:
            return messages, {"tools": tools.tools}
        name = self.tools.name if self.tools is not None else ""
        adds_system = not self.traits.refuses_roles
        return with_tools_as_text(messages, tools.tools, format=name, adds_system=adds_system), {}

    def prompt_end(
        self, tokenizer: Tokenizer, prompt_ids: Sequence[int], continued: ContinuedPart | None = None
    ) -> str:
        """The end of a prompt, which may open the reasoning.

        Of a message that is continued it is the marker that opens the reasoning, wherever it stands, or nothing.
        """
        if continued is not None and self.reasoning is not None:
            opening, text = self.reasoning.opening, continued.text
            is_open = continued.field != "content" or text.rfind(opening) > text.rfind(self.reasoning.closing)
            return opening if is_open else ""
        may_open = self.reasoning is not None or self.template is not None
        return tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:]) if may_open else ""

    def parsing(
        self, tokenizer: Tokenizer, prompt_end: str, tools: RequestedTools | None, *, hides_special: bool
    ) -> AnswerParsing | None:
        """How answers to a prompt with this end are parsed; None if they are only content."""
        if self.template is not None:
            return self._template_parsing(tokenizer, prompt_end, tools)
        if tools is None and self.reasoning is None:
            return None
        tool_format = self.tools if tools is not None else None
        special = self._special_ids(tokenizer, tool_format)
        # NOTE: in text between these markers anything goes, so a quoted marker is known by its tokens alone.
        is_harmony = "harmony" in {one.name for one in (tool_format, self.reasoning) if one is not None}
        marks = {i: text for text, i in special.items()} if is_harmony else {}
        new_parser = partial(
            AnswerParser,
            tool_format,
            self.reasoning,
            tools=tools.schemas if tools is not None else {},
            prompt_end=prompt_end,
            hidden=special if hides_special else (),
            tokens=frozenset(marks.values()),
            max_calls=tools.max_calls if tools is not None else None,
        )
        return AnswerParsing(new_parser, frozenset(special.values()), marks, self.reasoning is not None)

    def _template_parsing(self, tokenizer: Tokenizer, prompt_end: str, tools: RequestedTools | None) -> AnswerParsing:
        new_parser = partial(
            ResponseTemplateParser,
            self.template,
            tools.tools if tools is not None else None,
            prompt_end=prompt_end,
            max_calls=tools.max_calls if tools is not None else None,
        )
        shown = json.dumps(tokenizer.response_template).replace("\\", "")  # without the escapes of its patterns
        special_ids = frozenset(i for text, i in tokenizer.special_tokens.items() if text in shown)
        return AnswerParsing(new_parser, special_ids, has_reasoning=True)

    def grammar(self, tokenizer: Tokenizer, prompt_end: str, tools: RequestedTools | None, content: str) -> str:
        """The grammar of answers to a prompt with this end, if content must match the grammar `content` ("" = any).

        Returns "" if any answer will do. Raises `RequestError` for tools that cannot be written as a grammar.
        """
        is_required = tools is not None and tools.is_required
        if not is_required and (not content or (tools is None and self.reasoning is None)):
            return content
        if self.template is not None:
            if not is_required:
                return content
            raise RequestError(
                "Calls cannot be forced, because they are read by the checkpoint's response_template. Start the server "
                "with --tool-parser, or send tool_choice 'auto'.",
                param="tool_choice",
                code="unsupported_parameter",
            )
        tool_format = self.tools if tools is not None else None
        try:
            return tool_call_grammar(
                tool_format,
                tools.schemas if tools is not None else {},
                max_calls=tools.max_calls if tools is not None else None,
                reasoning=self.reasoning,
                is_reasoning_open=self.reasoning is not None and self.reasoning.is_open(prompt_end),
                special_ids=self._special_ids(tokenizer, tool_format),
                content="" if is_required else content,
            )
        except (RecursionError, ValueError) as exc:
            raise RequestError(f"Calls of the 'tools' cannot be forced: {exc}.", param="tools") from exc

    def _special_ids(self, tokenizer: Tokenizer, tool_format: ToolFormat | None) -> dict[str, int]:
        """The markers that are special tokens."""
        return {
            marker: tokenizer.special_tokens[marker]
            for format in (tool_format, self.reasoning)
            for marker in (format.markers if format is not None else ())
            if marker in tokenizer.special_tokens
        }


def choose_formats(config: RouterConfig, tokenizer: Tokenizer) -> AnswerFormats:
    """The formats that the configuration names, or that the model's chat template shows."""
    template, traits = tokenizer.chat_template, template_traits(tokenizer)
    detected = detect_tool_format(template)
    if config.tool_parser != "auto":
        tools = TOOL_FORMATS.get(config.tool_parser)
    elif traits.shows_tools or (traits.shows_calls and detected is not None and detected.name in TEXT_FORMATS):
        tools = detected
    else:
        tools = TOOL_FORMATS["hermes"]
    shows_calls = traits.shows_calls and (traits.shows_tools or tools is detected)
    has_template = tokenizer.response_template is not None
    if config.tool_parser == "response_template" or (config.tool_parser == "auto" and tools is None and has_template):
        return AnswerFormats(None, None, load_template(tokenizer.response_template), traits, shows_calls)
    if config.reasoning_parser == "auto":
        reasoning = detect_reasoning_format(template)
    else:
        reasoning = REASONING_FORMATS.get(config.reasoning_parser)
    return AnswerFormats(tools, reasoning, None, traits, shows_calls, _call_ids(tokenizer, tools))


def _call_ids(tokenizer: Tokenizer, tools: ToolFormat | None) -> frozenset[int]:
    markers = () if tools is None else tools.call_markers or tools.markers
    encoded = [tokenizer.encode(marker, add_special_tokens=False) for marker in markers]
    return frozenset(ids[0] for ids in encoded if len(ids) == 1)

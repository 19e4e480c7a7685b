"""Parses answers of models whose checkpoint has a response template, with transformers' own parser.

That parser raises for calls that are not JSON, and gives arguments as a whole at a call's end. With some patterns it
repeatedly rescans all text that it holds back. So it gets one character at a time, which shows for which text it
raised, and it may hold back only a bounded number of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tandem.protocol.errors import ConfigError
from tandem.text.tool_calls.events import Event, EventWriter, new_call_id

MAX_HELD_CHARS = 1024
NUM_ID_CHARS = 24
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CALLS_FIELD = "tool_calls"
FAILURES = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def load_template(template: object) -> Any:
    """A checkpoint's response template, checked. Raises `ConfigError`."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return load_response_template(template)
    except (*FAILURES, re.error) as exc:
        raise ConfigError(
            f"The checkpoint's response_template cannot be used: {exc}; name a format with --tool-parser"
        ) from exc


class ResponseTemplateParser:
    """As `AnswerParser`, with a response template. `tools` are as chat templates get them; None = no calls."""

    def __init__(
        self,
        template: Any,
        tools: Sequence[dict[str, Any]] | None,
        *,
        prompt_end: str = "",
        max_calls: int | None = None,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        has_anchor = template.truncate_past_last_anchor(prompt_end) != prompt_end
        self._parser: Any = ResponseParser(template, prefix=prompt_end if has_anchor else "", tools=tools)
        self._writer = EventWriter(
            (),
            new_id or partial(new_call_id, NUM_ID_CHARS),
            has_calls=tools is not None,
            has_reasoning=True,
            max_calls=max_calls,
        )
        self._held: list[str] = []  # characters of which the parser has reported nothing yet
        self._call: list[str] = []  # the text of the call that is being read
        self._space: list[str] = []  # white space that is dropped if the region's text ends after it
        self._is_at_start = True  # whether a region has just begun, where white space is dropped

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._writer.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether the text that comes next belongs to reasoning."""
        return self._writer.is_reasoning

    def feed(self, text: str) -> list[Event]:
        """The events that more text adds."""
        for position, char in enumerate(text):
            if self._parser is None:
                self._writer.content(text[position:])
                break
            self._held.append(char)
            self._try(partial(self._parser.feed, char))
            if len(self._held) > MAX_HELD_CHARS:
                self._give_up()
        return self._writer.take()

    def finish(self) -> list[Event]:
        """The events left at the end of the answer. Call it once, after the last `feed`."""
        if self._parser is not None:
            self._try(lambda: self._parser.finalize()[1])
        return self._writer.take()

    def _try(self, parse: Callable[[], list[dict[str, Any]]]) -> None:
        try:
            events = parse()
        except FAILURES:
            self._give_up()
            return
        num_chunk_chars = sum(len(event["text"]) for event in events if event["type"] == "region_chunk")
        for event in events:
            if event["type"] == "region_chunk":
                num_chunk_chars -= len(event["text"])
                del self._held[: len(event["text"])]
                self._read_chunk(event["field"], event["text"])
            else:
                self._read_border(event, "".join(self._held[: len(self._held) - num_chunk_chars]))
        if any(event["type"] != "region_chunk" for event in events):
            self._held.clear()  # a marker

    def _give_up(self) -> None:
        """Make everything that follows content, and before it what was held back or belongs to an unfinished call."""
        self._parser = None
        self._writer.is_reasoning = False
        for text in (*self._space, *self._call, *self._held):
            self._writer.content(text)

    def _read_chunk(self, field: str, text: str) -> None:
        if field == CALLS_FIELD:
            self._call.append(text)
        else:
            self._write(self._writer.reasoning if field in REASONING_FIELDS else self._writer.content, text)

    def _read_border(self, event: dict[str, Any], marker: str) -> None:
        """A region begins or ends with this marker."""
        self._space, self._is_at_start = [], True
        self._writer.is_reasoning = event["type"] == "region_open" and event["field"] in REASONING_FIELDS
        if event["field"] != CALLS_FIELD:
            return
        if event["type"] == "region_open":
            self._call = [marker]
        else:
            self._end_calls(event["value"], "".join([*self._call, marker]))
            self._call = []

    def _end_calls(self, value: Any, text: str) -> None:
        """Pass on the calls in this text, or the text itself if it is not calls."""
        found = [_name_and_arguments(call) for call in (value if isinstance(value, list) else [value])]
        calls = [one for one in found if one is not None and self._writer.is_name(one[0], known_only=False)]
        if not self._writer.has_calls or len(calls) < len(found):
            self._writer.content(text)
            return
        for name, arguments in calls:
            self._writer.begin_call(name)
            self._writer.arguments(arguments)

    def _write(self, sink: Callable[[str], None], piece: str) -> None:
        """Pass on a region's text without the white space around it."""
        text = piece.lstrip() if self._is_at_start else piece
        shown = text.rstrip()
        if shown:
            for space in self._space:
                sink(space)
            sink(shown)
            self._space, self._is_at_start = [], False
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])


def _name_and_arguments(call: Any) -> tuple[str, str] | None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments")
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, allow_nan=False)
        text.encode()  # a lone surrogate cannot be sent
    except ValueError:
        return None
    return function["name"], text

"""What an answer consists of: content, reasoning and tool calls, as events that a parser returns piece by piece."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

TOOL_NAME = r"[\w.:/-]{1,256}"
_NAME = re.compile(TOOL_NAME, re.ASCII)


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool begins. Its arguments follow."""

    index: int  # the call's index in the answer
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of a call's arguments. The pieces of a call join to a JSON object if the model wrote one."""

    index: int
    text: str


Event = Content | Reasoning | ToolCallBegin | ToolCallArguments


def content_events(text: str) -> list[Event]:
    """The events of a text that is all content."""
    return [Content(text)] if text else []


def joined_events(events: Iterable[Event]) -> list[Event]:
    """The events with adjoining pieces of the same kind as one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ToolCallBegin) or type(event) is not type(last):
            joined.append(event)
        else:
            assert not isinstance(last, ToolCallBegin | None)
            joined[-1] = replace(last, text=last.text + event.text)
    return joined


def new_call_id(num_chars: int) -> str:
    """A random id of letters and digits; one of more than 9 characters starts with `call_`, as OpenAI's do."""
    letters = string.ascii_letters + string.digits
    id = "".join(secrets.choice(letters) for _ in range(num_chars))
    return id if num_chars <= 9 else f"call_{id}"


class EventWriter:
    """Collects the events of one answer; adjoining pieces of the same kind become one event."""

    def __init__(
        self,
        tool_names: Collection[str],
        new_id: Callable[[], str],
        *,
        has_calls: bool,
        has_reasoning: bool,
        max_calls: int | None = None,
    ) -> None:
        self.has_calls = has_calls  # otherwise text in the form of a call is content
        self.has_reasoning = has_reasoning
        self.is_reasoning = False  # whether the next text belongs to reasoning
        self._max_calls = max_calls  # later ones are dropped
        self._tool_names = tool_names
        self._new_id = new_id
        self._events: list[ToolCallBegin | tuple[type[Content] | type[Reasoning] | int, list[str]]] = []
        self.num_calls = 0
        self.has_content = False
        self._ids: set[str] = set()

    def content(self, text: str) -> None:
        """Add a piece of content."""
        self.has_content = self.has_content or bool(text.strip())
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        """Add a piece of reasoning."""
        self._add(Reasoning, text)

    def begin_call(self, name: str, id: str = "") -> None:
        """Add a call; later `arguments` belong to it. It keeps the id that the model gave it if that id is new."""
        if not self._is_dropped(self.num_calls):
            if not id or id in self._ids:
                id = self._new_id()
            self._ids.add(id)
            self._events.append(ToolCallBegin(self.num_calls, id, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add a piece of the last call's arguments."""
        if not self._is_dropped(self.num_calls - 1):
            self._add(self.num_calls - 1, text)

    def is_name(self, name: str, *, known_only: bool) -> bool:
        """Whether a tool may have this name; with `known_only`, whether one of the request's tools has it."""
        return name in self._tool_names if known_only else _NAME.fullmatch(name) is not None

    def take(self) -> list[Event]:
        """The events since the last call of this method."""
        events, self._events = self._events, []
        return [one if isinstance(one, ToolCallBegin) else _event(*one) for one in events]

    def _is_dropped(self, index: int) -> bool:
        return self._max_calls is not None and index >= self._max_calls

    def _add(self, kind: type[Content] | type[Reasoning] | int, text: str) -> None:
        if not text:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, tuple) and last[0] == kind:
            last[1].append(text)
        else:
            self._events.append((kind, [text]))


def _event(kind: type[Content] | type[Reasoning] | int, pieces: list[str]) -> Event:
    text = "".join(pieces)
    return ToolCallArguments(kind, text) if isinstance(kind, int) else kind(text)

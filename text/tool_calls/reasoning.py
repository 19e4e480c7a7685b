"""The formats in which models write their reasoning before an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.harmony import HARMONY_MARKERS
from tandem.text.tool_calls.reader import Markers, Reading, TextReader


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The two strings around reasoning. Chat templates may write the first one at the end of the prompt."""

    name: str
    opening: str
    closing: str
    markers: tuple[str, ...]  # strings that the reader must see even if they are special tokens

    @property
    def template_marks(self) -> tuple[str, ...]:
        """Strings of which a chat template of this format has one. Other formats share the mark that ends a header."""
        return (self.opening,) if self.opening in HARMONY_MARKERS else (self.opening, self.closing)

    def is_open(self, prompt_end: str) -> bool:
        """Whether a prompt with this end leaves the model within its reasoning."""
        return prompt_end.rstrip().endswith(self.opening)


def read_reasoning(
    reader: TextReader,
    writer: EventWriter,
    format: ReasoningFormat,
    *,
    is_open: bool,
    ended_by: str = "",
    sink: Callable[[str], None] | None = None,
) -> Reading[None]:
    """Read the reasoning at the beginning of an answer, and the white space after it.

    The marker `ended_by` of calls ends it too, and comes next. `sink` gets a copy of the reasoning's text.
    """

    def add(text: str) -> None:
        writer.reasoning(text)
        if sink is not None:
            sink(text)

    ends = Markers(*filter(None, (format.closing, ended_by)))
    writer.is_reasoning = is_open
    while True:
        yield from reader.skip_space()
        if not is_open and not (yield from reader.literal(format.opening)):
            return
        is_open, writer.is_reasoning = False, True
        yield from reader.drop_space()
        marker = yield from reader.text_until(ends, add)
        writer.is_reasoning = False
        if marker and marker == ended_by:
            reader.unread(marker)
            return
        yield from reader.drop_space()


def _between(name: str, opening: str, closing: str) -> ReasoningFormat:
    return ReasoningFormat(name, opening, closing, (opening, closing))


_ALL = (
    ReasoningFormat("harmony", "<|channel|>", "<|message|>", HARMONY_MARKERS),  # read by `read_harmony`
    _between("think", "<think>", "</think>"),  # DeepSeek R1, Qwen3, GLM, SmolLM3 and others
    _between("mistral", "[THINK]", "[/THINK]"),
    _between("seed_oss", "<seed:think>", "</seed:think>"),
    _between("kimi", "◁think▷", "◁/think▷"),
)
REASONING_FORMATS = {format.name: format for format in _ALL}  # in the order in which templates are searched


def detect_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """The format in which a model with this template writes its reasoning; None if it has no known one."""
    formats = REASONING_FORMATS.values()
    return next((one for one in formats if any(mark in chat_template for mark in one.template_marks)), None)

"""Detects the formats that a model writes from its chat template."""

from __future__ import annotations

import re

from tandem.text.tool_calls.formats import TOOL_FORMATS, ToolFormat
from tandem.text.tool_calls.reasoning import REASONING_FORMATS, ReasoningFormat

__all__ = ["detect_reasoning_format", "detect_tool_format", "renders_calls", "renders_tools"]


def renders_tools(chat_template: str) -> bool:
    """Whether a chat template shows the model the tools of a request."""
    return "tools" in chat_template


def renders_calls(chat_template: str) -> bool:
    """Whether a chat template shows the model the calls that it made before."""
    return "tool_calls" in chat_template


def detect_tool_format(chat_template: str) -> ToolFormat | None:
    """The format in which a model with this template writes tool calls; None if it is not known."""
    return next((one for one in TOOL_FORMATS.values() if re.search(one.template_mark, chat_template)), None)


def detect_reasoning_format(chat_template: str) -> ReasoningFormat | None:
    """The format in which a model with this template writes its reasoning; None if it has no known one."""
    formats = REASONING_FORMATS.values()
    return next((one for one in formats if any(mark in chat_template for mark in one.template_marks)), None)

"""Calls written as Python: `f(a=1, b=["x"])`. Only literals are understood, and nothing is evaluated."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from tandem.router.tool_calls.events import EventWriter
from tandem.router.tool_calls.reader import Reading, TextReader

__all__ = ["read_pythonic_call"]

MAX_CALL_CHARS = 1 << 17  # Python's parser takes about 1 KB for each number in a list
_NAME = re.compile(r"[\w.]+")
_PLAIN = re.compile(r"[^'\"()\[\]{}]+")
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]+") for quote in "'\""}


def read_pythonic_call(reader: TextReader, writer: EventWriter) -> Reading[bool]:
    """Read a call of a known tool; whether there is one. It is told of when its closing parenthesis is read."""
    reader.hold()
    yield from reader.skip_space()
    name = yield from reader.run(_NAME)
    if (yield from reader.next_char()) != "(" or not writer.is_name(name, known_only=True):
        return False
    pieces: list[str] = []
    if not (yield from _read_parentheses(reader, pieces.append)):
        return False
    arguments = _json_arguments("".join(pieces))
    if arguments is None:
        return False
    reader.release()
    writer.begin_call(name)
    writer.arguments(arguments)
    return True


def _read_parentheses(reader: TextReader, sink: Callable[[str], None]) -> Reading[bool]:
    """Read and pass on a parenthesis and all within it; whether it is closed."""
    depth = 0
    while True:
        yield from reader.each_of(_PLAIN, sink)
        char = yield from reader.next_char()
        yield from reader.literal(char)
        sink(char)
        if char and char in "'\"":
            yield from _pass_string(reader, sink, char)
        elif char and char in "([{":
            depth += 1
        else:
            depth -= 1  # NOTE: which bracket it is, Python's parser will say
        if not char or not depth:
            return bool(char)


def _pass_string(reader: TextReader, sink: Callable[[str], None], quote: str) -> Reading[None]:
    while True:
        yield from reader.each_of(_IN_STRING[quote], sink)
        char = yield from reader.next_char()
        yield from reader.literal(char)
        sink(char)
        if char != "\\":
            return
        escaped = yield from reader.next_char()
        yield from reader.literal(escaped)
        sink(escaped)


def _json_arguments(text: str) -> str | None:
    """`(a=1, b="x")` as a JSON object; None if it is something else."""
    if len(text) > MAX_CALL_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape sequence in a string warns, and stays as it is
            call = ast.parse(f"f{text}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args or any(item.arg is None for item in call.keywords):
                return None
            return json.dumps({str(item.arg): _value(item.value) for item in call.keywords}, allow_nan=False)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return None


def _value(node: ast.expr) -> Any:
    """The value of a literal. JSON's names of constants are understood too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    key = None if node is None else ast.literal_eval(node)
    if not isinstance(key, str):
        raise TypeError("JSON's keys are strings")
    return key

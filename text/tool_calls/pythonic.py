"""Calls written as Python: `f(a=1, b=["x"])`. Only literals are understood, and nothing is evaluated.

Calls are turned into JSON as they arrive, so the end of a long one costs no more than any other part of it.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata

from tandem.text.tool_calls.events import EventWriter
from tandem.text.tool_calls.reader import Reading, TextReader

MAX_DEPTH = 100  # nested brackets
MAX_NUMBER_CHARS = 4300  # Python has the same limit

_FUNCTION = re.compile(r"[\w.]+")
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(r"[\w.]+", re.ASCII)
_INTEGER = re.compile(r"0|[1-9][0-9]*")
_ZEROS_FIRST = re.compile(r"0[0-9_]*[1-9][0-9_]*")
_CHAR_NAME = re.compile(r"[\w -]+", re.ASCII)
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_QUOTES = "'\""
_IN_STRING = {quote: re.compile(rf"[^{quote}\\]+") for quote in _QUOTES}
_IS_RAW = {"r": True, "R": True, "u": False, "U": False}  # by a string's prefix
_CLOSINGS = {"[": "]", "(": ")", "{": "}"}
_ESCAPED = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
            "t": "\t", "v": "\v"}  # fmt: skip
_NUM_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_MAX_CHAR = 0x10FFFF


def read_pythonic_call(reader: TextReader, writer: EventWriter) -> Reading[bool]:
    """Read a call of a known tool. Returns whether there is one. It is reported at its closing parenthesis."""
    reader.hold()
    yield from reader.skip_space()
    name = yield from reader.run(_FUNCTION)
    if (yield from reader.next_char()) != "(" or not writer.is_name(name, known_only=True):
        return False
    literals = _Literals(reader)
    if not (yield from literals.read_arguments()):
        return False
    reader.release()
    writer.begin_call(name)
    writer.arguments("".join(literals.json))
    return True


class _Bracket:
    """A bracket that is not closed yet."""

    def __init__(self, opening: str, position: int) -> None:
        self.closing = _CLOSINGS[opening]
        self.position = position  # where its opening is in the JSON
        self.num_items = 0
        self.has_comma = False


class _Literals:
    """Reads Python's literals and writes them as JSON. Its methods return whether what comes next is one."""

    def __init__(self, reader: TextReader) -> None:
        self.json: list[str] = []
        self._reader = reader

    def read_arguments(self) -> Reading[bool]:
        """Read `(a=1, b="x")` as an object."""
        reader, keys = self._reader, set[str]()
        yield from reader.literal("(")
        self.json.append("{")
        while True:
            yield from reader.skip_space()
            if (yield from reader.literal(")")):
                self.json.append("}")
                return True
            key = yield from reader.run(_WORD)
            yield from reader.skip_space()
            if not key.isidentifier() or key in keys or not (yield from reader.literal("=")):
                return False
            self.json.append(f"{', ' if keys else ''}{json.dumps(key)}: ")
            keys.add(key)
            if not (yield from self._read_value()):
                return False
            yield from reader.skip_space()
            if not (yield from reader.literal(",")) and (yield from reader.next_char()) != ")":
                return False

    def _read_value(self) -> Reading[bool]:
        """Read a value, without recursion for values within it: waiting for more text must not get slower."""
        brackets: list[_Bracket] = []
        while True:
            yield from self._reader.skip_space()
            char = yield from self._reader.next_char()
            if char and char in _CLOSINGS:
                if len(brackets) == MAX_DEPTH:
                    return False
                yield from self._reader.literal(char)
                brackets.append(_Bracket(char, len(self.json)))
                self.json.append("{" if char == "{" else "[")
            elif not (yield from self._read_scalar(char)):
                return False
            if not (yield from self._close(brackets)):
                return True
            if not (yield from self._begin_item(brackets[-1])):
                return False

    def _close(self, brackets: list[_Bracket]) -> Reading[bool]:
        """Read closing brackets, with a comma before them. Returns whether any bracket is still open."""
        while brackets:
            bracket = brackets[-1]
            yield from self._reader.skip_space()
            if bracket.num_items and not bracket.has_comma:
                bracket.has_comma = yield from self._reader.literal(",")
                yield from self._reader.skip_space()
            if not (yield from self._reader.literal(bracket.closing)):
                return True
            brackets.pop()
            if bracket.closing == ")" and bracket.num_items == 1 and not bracket.has_comma:
                self.json[bracket.position] = ""  # parentheses around one value do not make a tuple
            else:
                self.json.append("}" if bracket.closing == "}" else "]")
        return False

    def _begin_item(self, bracket: _Bracket) -> Reading[bool]:
        """Read what comes before the value of an item: in an object, the key."""
        if bracket.num_items:
            if not bracket.has_comma:
                return False
            self.json.append(", ")
        bracket.num_items += 1
        bracket.has_comma = False
        if bracket.closing != "}":
            return True
        yield from self._reader.skip_space()
        char = yield from self._reader.next_char()
        if not (yield from (self._read_strings() if char and char in _QUOTES else self._read_word(strings_only=True))):
            return False
        yield from self._reader.skip_space()
        self.json.append(": ")
        return (yield from self._reader.literal(":"))

    def _read_scalar(self, char: str) -> Reading[bool]:
        """Read a string, a number or a constant, which begins with this character."""
        if char and char in _QUOTES:
            return (yield from self._read_strings())
        if char and char in "+-.0123456789":
            return (yield from self._read_number(char))
        return (yield from self._read_word())

    def _read_word(self, *, strings_only: bool = False) -> Reading[bool]:
        """Read a constant, or a string with a prefix. JSON's names of constants are accepted too."""
        word = yield from self._reader.run(_WORD)
        if word in _IS_RAW:
            return (yield from self._read_strings(is_raw=_IS_RAW[word]))
        if word not in _CONSTANTS or strings_only:
            return False
        self.json.append(_CONSTANTS[word])
        return True

    def _read_number(self, char: str) -> Reading[bool]:
        sign = ""
        if char in "+-":
            yield from self._reader.literal(char)
            yield from self._reader.skip_space()
            sign = "-" if char == "-" else ""
        text = yield from self._reader.run(_NUMBER)
        if text[-1:] in ("e", "E") and text[:2] not in ("0x", "0X"):
            for exponent_sign in "+-":
                if (yield from self._reader.literal(exponent_sign)):
                    text += exponent_sign + (yield from self._reader.run(_NUMBER))
                    break
        number = _json_number(text)
        if number is None:
            return False
        self.json.append(sign + number)
        return True

    def _read_strings(self, *, is_raw: bool = False) -> Reading[bool]:
        """Read a string and the strings right after it, which Python joins."""
        self.json.append('"')
        while True:
            quote = yield from self._reader.next_char()
            if not quote or quote not in _QUOTES or not (yield from self._read_string(quote, is_raw=is_raw)):
                return False
            yield from self._reader.skip_space()
            char = yield from self._reader.next_char()
            is_raw = False
            if char.isalpha():
                word = yield from self._reader.run(_WORD)
                if word not in _IS_RAW:
                    return False
                is_raw = _IS_RAW[word]
            elif not char or char not in _QUOTES:
                self.json.append('"')
                return True

    def _read_string(self, quote: str, *, is_raw: bool) -> Reading[bool]:
        """Read a string in one or three quotes. Both may contain newlines, because models forget to escape them."""
        reader, end = self._reader, quote
        yield from reader.literal(quote)
        if (yield from reader.literal(quote * 2)):
            end = quote * 3
        while True:
            yield from reader.each_of(_IN_STRING[quote], self._add_text)
            if (yield from reader.literal(end)):
                return True
            if (yield from reader.literal("\\")):
                if not (yield from self._read_escaped(is_raw=is_raw)):
                    return False
            elif (yield from reader.literal(quote)):
                self._add_text(quote)
            else:
                return False

    def _read_escaped(self, *, is_raw: bool) -> Reading[bool]:
        """Read what follows a backslash."""
        reader = self._reader
        char = yield from reader.next_char()
        if char in _NUM_HEX_DIGITS and not is_raw:
            yield from reader.literal(char)
            return (yield from self._read_code(16, _NUM_HEX_DIGITS[char], _NUM_HEX_DIGITS[char]))
        if char and char in "01234567" and not is_raw:
            return (yield from self._read_code(8, 1, 3))
        yield from reader.literal(char)
        if char == "N" and not is_raw:
            return (yield from self._read_char_name())
        self._add_text("\\" + char if is_raw or char not in _ESCAPED else _ESCAPED[char])
        return bool(char)

    def _read_code(self, base: int, least: int, most: int) -> Reading[bool]:
        """Read a character by its code."""
        digits = ""
        while len(digits) < most:
            char = yield from self._reader.next_char()
            if not char or char not in "0123456789abcdefABCDEF" or int(char, 16) >= base:
                break
            yield from self._reader.literal(char)
            digits += char
        if len(digits) < least or (code := int(digits, base)) > _MAX_CHAR:
            return False
        self._add_text(chr(code))
        return True

    def _read_char_name(self) -> Reading[bool]:
        if not (yield from self._reader.literal("{")):
            return False
        name = yield from self._reader.run(_CHAR_NAME)
        try:
            self._add_text(unicodedata.lookup(name))
        except KeyError:
            return False
        return (yield from self._reader.literal("}"))

    def _add_text(self, text: str) -> None:
        self.json.append(json.dumps(text)[1:-1])


def _json_number(text: str) -> str | None:
    """A Python number as JSON; None if it is not a number, or not finite."""
    if len(text) > MAX_NUMBER_CHARS or _ZEROS_FIRST.fullmatch(text):
        return None
    if _INTEGER.fullmatch(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return repr(value) if math.isfinite(value) else None

"""Collects the rules of one grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from tandem.protocol.sampling import MAX_GRAMMAR_CHARS
from tandem.text.structured_output.closed_objects import closed_objects

ANY_TEXT = "/(?s:.*)/"


class LarkRules:
    """Rules that refer to each other by name. Special tokens are written as ids, because text does not match them."""

    def __init__(self, json_style: Mapping[str, Any], special_ids: Mapping[str, int] = {}) -> None:
        """`json_style`: llguidance's options for the white space in JSON."""
        self.special_ids = special_ids
        self._json_style = json_style
        self._special = re.compile(f"({'|'.join(map(re.escape, special_ids)) or '(?!)'})")
        self._rules: list[str] = []
        self._num_chars = 0

    def add(self, body: str, attributes: str = "", *, is_terminal: bool = False) -> str:
        """Add a rule. Returns its name. Raises `ValueError` if the grammar becomes too large."""
        self._num_chars += len(body)
        if self._num_chars > MAX_GRAMMAR_CHARS:  # definitions are repeated for each parameter that may use them
            raise ValueError(f"the grammar has more than {MAX_GRAMMAR_CHARS} characters")
        name = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def text(self, text: str) -> str:
        """This text."""
        ids = self.special_ids
        parts = filter(None, self._special.split(text))
        return " ".join(f"<[{ids[part]}]>" if part in ids else quoted(part) for part in parts)

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value that fits this schema."""
        styled = {**closed_objects(schema), "x-guidance": self._json_style}
        return self.add(f"%json {json.dumps(styled, ensure_ascii=False)}")

    def any_until(self, marker: str) -> str:
        """Any text up to and with a marker."""
        before, *token = self._special.split(marker, maxsplit=1)
        if not token:
            return self.add(ANY_TEXT, f"[suffix={quoted(marker)}]")
        before = re.escape(before).replace("/", r"\/")
        return f"/(?s:.*){before}/ {self.text(''.join(token))}"

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])


def lark_of(grammar: str) -> str:
    """A grammar in Lark's form, from one in that form or in GBNF. Raises `ValueError`."""
    if "::=" not in grammar:  # every rule of GBNF has it
        return grammar
    try:
        lark: str = any_to_lark(grammar)
    except GbnfToLarkError as exc:
        raise ValueError(str(exc)) from exc
    return lark


def row(*parts: str) -> str:
    """One after the other."""
    return " ".join(filter(None, parts))


def one_of(texts: Iterable[str]) -> str:
    """One of these texts."""
    return f"({' | '.join(map(quoted, texts))})"


def quoted(text: str) -> str:
    """This text, all of which is ordinary tokens. Lark refuses the character DEL, which JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` for a backslash at the end, which llguidance would drop."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("the pattern ends with a backslash that escapes nothing")


def regex(pattern: str) -> str:
    """Text that matches a pattern: it stands between slashes, so those within it are escaped, and so are line ends.

    Raises `ValueError`.
    """
    check_pattern(pattern)
    special = {"/": r"\/", "\n": r"\n"}
    escaped = re.sub(r"(?s)\\.|[/\n]", lambda found: special.get(found[0], found[0]), pattern)
    return f"/{escaped}/"

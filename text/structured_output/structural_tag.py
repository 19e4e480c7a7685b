"""Structural tags, in both forms that vLLM and SGLang take: `format`, and the older `structures` with `triggers`.

They become a grammar in llguidance's dialect of Lark. A lazy lexeme ends as early as it can, so free text ends at a
trigger or at the text that closes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.text.structured_output.lark_rules import ANY_TEXT, LarkRules, lark_of, one_of, quoted, regex

Text = Annotated[str, Meta(min_length=1)]


class _Format(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """The form of a part of the output. Unknown fields are refused, because they would change it."""


class ConstString(_Format, frozen=True, tag="const_string"):
    """This text."""

    value: str


class JsonSchema(_Format, frozen=True, tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: bool | dict[str, Any]
    style: Literal["json"] = "json"
    any_order: Literal[False] = False


class AnyText(_Format, frozen=True, tag="any_text"):
    """Any text that does not contain certain others."""

    excludes: list[Text] = []


class Regex(_Format, frozen=True, tag="regex"):
    """Text that matches a regular expression."""

    pattern: str


class Grammar(_Format, frozen=True, tag="grammar"):
    """Text that matches a grammar in Lark's form or in GBNF."""

    grammar: str


class Row(_Format, frozen=True, tag="sequence"):
    """One after the other."""

    elements: Annotated[list[Format], Meta(min_length=1)]


class Either(_Format, frozen=True, tag="or"):
    """One of them."""

    elements: Annotated[list[Format], Meta(min_length=1)]


class Optional(_Format, frozen=True, tag="optional"):
    """The part, zero or one time."""

    content: Format


class Plus(_Format, frozen=True, tag="plus"):
    """Once or more."""

    content: Format


class Star(_Format, frozen=True, tag="star"):
    """Any number of times."""

    content: Format


class Repeat(_Format, frozen=True, tag="repeat"):
    """At least `min` and at most `max` times; -1 = no limit."""

    content: Format
    min: Annotated[int, Meta(ge=0)]
    max: Annotated[int, Meta(ge=-1)]


class Tag(_Format, frozen=True, tag="tag"):
    """`begin`, the content, and one of the ends."""

    begin: str
    content: Format
    end: str | Annotated[list[str], Meta(min_length=1)]

    @property
    def ends(self) -> list[str]:
        """The texts that may close it."""
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Free text in which each trigger begins one of the tags. With `at_least_one` the first tag comes at once."""

    triggers: Annotated[list[Text], Meta(min_length=1)]
    tags: Annotated[list[Tag], Meta(min_length=1)]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Text] = []


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    """Tags with a text between them, and nothing else."""

    tags: Annotated[list[Tag], Meta(min_length=1)]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString | JsonSchema | AnyText | Regex | Grammar | Row | Either | Optional | Plus | Star | Repeat | Tag
    | TriggeredTags | TagsWithSeparator
)  # fmt: skip


class _Structure(msgspec.Struct, frozen=True):
    """A tag of the older form."""

    begin: str
    end: str
    schema: dict[str, Any] | str = {}  # a string is the schema's JSON


class _Document(msgspec.Struct, frozen=True):
    """A document in either form."""

    format: Format | UnsetType = UNSET
    structures: list[_Structure] | None = None
    triggers: list[Text] | None = None


def structural_tag_grammar(text: str, whitespace: str) -> str:
    """The grammar of structural tags, given as JSON, with this regular expression for the white space in JSON.

    Raises ValueError or MsgspecError for what is malformed or not supported.
    """
    document = msgspec.json.decode(text, type=_Document)
    form = _older_form(document) if document.format is UNSET else document.format
    return _Writer(whitespace).grammar(form)


def _older_form(document: _Document) -> TriggeredTags:
    if not document.structures or not document.triggers:
        raise ValueError("it needs 'format', or 'structures' and 'triggers'")
    schemas = [json.loads(one.schema) if isinstance(one.schema, str) else one.schema for one in document.structures]
    tags = [
        Tag(begin=one.begin, content=JsonSchema(json_schema=schema), end=one.end)
        for one, schema in zip(document.structures, schemas, strict=True)
    ]
    return TriggeredTags(triggers=document.triggers, tags=tags)


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, whitespace: str) -> None:
        self._rules = LarkRules({"whitespace_pattern": whitespace})
        self._grammars: list[dict[str, str]] = []  # grammars that are parts of it

    def grammar(self, form: Format) -> str:
        """The whole grammar."""
        start = self._write(form, is_last=True)
        lark = self._rules.grammar(start)
        if not self._grammars:
            return lark
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self._grammars]}, ensure_ascii=False)

    def _write(self, form: Format, *, is_last: bool) -> str:
        """Write a format as an expression. Free text that nothing closes can only come last."""
        match form:
            case ConstString(value):
                return quoted(value)
            case JsonSchema(schema):
                return self._json(schema)
            case Regex(pattern):
                return regex(pattern)
            case Grammar(grammar):
                name = f"g{len(self._grammars)}"
                self._grammars.append({"name": name, "lark_grammar": lark_of(grammar)})
                return f"@{name}"
            case Row(elements):
                return self._row(elements, is_last=is_last)
            case Either(elements):
                return f"({' | '.join(self._write(one, is_last=is_last) for one in elements)})"
            case Optional(content):
                return f"({self._write(content, is_last=is_last)})?"
            case Plus() | Star() | Repeat():
                return f"({self._write(form.content, is_last=False)}){_times(form)}"
            case Tag():
                return f"{quoted(form.begin)} {self._content_and_end(form)}"
            case TagsWithSeparator():
                return self._separated(form)
        if not is_last:
            raise ValueError(
                "any_text and triggered_tags must come last, or any_text before the text of a const_string or a tag"
            )
        return self._free_text(form.excludes) if isinstance(form, AnyText) else self._triggered(form)

    def _row(self, elements: Sequence[Format], *, is_last: bool) -> str:
        written: list[str] = []
        remaining = list(elements)
        while remaining:
            form = remaining.pop(0)
            following = remaining[0] if remaining else None
            if isinstance(form, AnyText) and isinstance(following, ConstString | Tag):
                del remaining[0]
                text = following.value if isinstance(following, ConstString) else following.begin
                written.append(self._text_until([text], form.excludes))
                written += [self._content_and_end(following)] if isinstance(following, Tag) else []
            else:
                written.append(self._write(form, is_last=is_last and not remaining))
        return f"({' '.join(written)})"

    def _content_and_end(self, tag: Tag) -> str:
        """A tag after its begin."""
        if isinstance(tag.content, AnyText):
            return self._text_until(tag.ends, tag.content.excludes)
        return f"{self._write(tag.content, is_last=False)} {one_of(tag.ends)}"

    def _separated(self, form: TagsWithSeparator) -> str:
        tag = self._rules.add(" | ".join(self._write(one, is_last=False) for one in form.tags))
        tags = tag if form.stop_after_first else f"{tag} ({quoted(form.separator)} {tag})*"
        return f"({tags})" if form.at_least_one else f"({tags})?"

    def _triggered(self, form: TriggeredTags) -> str:
        by_trigger: dict[str, list[Tag]] = {}
        for tag in form.tags:
            trigger = next((trigger for trigger in form.triggers if tag.begin.startswith(trigger)), None)
            if trigger is None:
                raise ValueError(f"none of the triggers begins {tag.begin[:100]!r}")
            by_trigger.setdefault(trigger, []).append(tag)
        tags = []
        for trigger, triggered in by_trigger.items():
            rests = (f"{quoted(tag.begin[len(trigger) :])} {self._content_and_end(tag)}" for tag in triggered)
            tags.append(f"{self._text_until([trigger], form.excludes)} ({' | '.join(rests)})")
        tail = self._free_text(form.excludes)
        any_tag = self._rules.add(" | ".join(tags))
        first = f"({' | '.join(self._write(one, is_last=False) for one in form.tags)})" if form.at_least_one else ""
        if form.stop_after_first:
            return first or f"({any_tag} | {tail})"
        return f"({first} {any_tag}* {tail})"

    def _json(self, schema: bool | dict[str, Any]) -> str:
        if schema is False:
            raise ValueError("no JSON fits the schema false")
        schema = {} if schema is True else schema
        return self._rules.json(schema)

    def _text_until(self, ends: Sequence[str], excludes: Sequence[str]) -> str:
        """Free text, and the first of the ends after it."""
        if "" in ends:
            raise ValueError("any_text needs a text that closes it")
        return self._rules.add(f"{self._free_text(excludes)} {one_of(ends)}", "[lazy]")

    def _free_text(self, excludes: Sequence[str]) -> str:
        excluded = "|".join("".join(f"\\x{{{ord(char):X}}}" for char in text) for text in excludes)
        without = f" & ~/(?s:.*)({excluded})(?s:.*)/" if excludes else ""
        return self._rules.add(f"{ANY_TEXT}{without}", is_terminal=True)


def _times(form: Plus | Star | Repeat) -> str:
    if not isinstance(form, Repeat):
        return "+" if isinstance(form, Plus) else "*"
    if form.max == -1:
        return f"{{{form.min},}}"
    if form.max < form.min:
        raise ValueError(f"max {form.max} is less than min {form.min}")
    return f"{{{form.min},{form.max}}}"

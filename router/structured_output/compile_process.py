"""The process that makes grammars of constraints and tries them out.

    python -m tandem.router.structured_output.compile_process

A hostile schema may take hours in one call that nothing can interrupt, or all memory. So it is compiled here first, and
the kernel ends the process that takes too much.

Frames on stdin and stdout: four bytes of length, then msgpack. The first one is the text of a `tokenizer.json`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Annotated, Any, BinaryIO

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark
from msgspec import Meta

from tandem.protocol.grammar import GrammarError, check_matcher, compile_grammar, make_grammar_tokenizer

__all__ = ["MAX_CPU_S", "Compiled", "Question", "make_grammar", "read_frame", "write_frame"]

MAX_CPU_S = 1.0  # of one grammar
MAX_MEMORY_BYTES = 4 << 30
# Models that are unsure write white space for ever. This is enough to indent a line.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


class Tag(msgspec.Struct):
    """A structure in free text: `begin`, what matches the schema, `end`."""

    begin: str
    end: str
    schema: dict[str, Any] = {}


class StructuralTags(msgspec.Struct):
    """Structures, and the texts with which they begin."""

    structures: Annotated[list[Tag], Meta(min_length=1)]
    triggers: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


class Question(msgspec.Struct):
    """A constraint; see `constraint.Constraint`."""

    kind: str
    text: str


class Compiled(msgspec.Struct):
    """Its grammar in llguidance's form, or why it cannot be used."""

    grammar: str = ""
    error: str = ""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router; this process ends with its stdin
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer_json = read_frame(questions)
    if tokenizer_json is None:
        return
    tokenizer = make_grammar_tokenizer(msgspec.msgpack.decode(tokenizer_json, type=str), None, ())
    write_frame(answers, b"")  # ready
    while (frame := read_frame(questions)) is not None:
        question = msgspec.msgpack.decode(frame, type=Question)
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF, which nobody handles, ends the process
        answer = _answer(tokenizer, question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(answers, msgspec.msgpack.encode(answer))


def make_grammar(kind: str, text: str) -> str:
    """The grammar of a constraint, not compiled yet. Raises ValueError or MsgspecError for what is malformed."""
    matcher = llguidance.LLMatcher
    if kind == "llguidance":
        return text
    if kind == "json":
        return matcher.grammar_from_json_schema(
            "{}" if text == "true" else text, overrides={"whitespace_pattern": WHITESPACE}
        )
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        return matcher.grammar_from_lark("start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices))
    if kind == "grammar":
        return matcher.grammar_from_lark(any_to_lark(text))
    assert kind == "structural_tag", f"unknown kind {kind}"
    return matcher.grammar_from_lark(_tags_grammar(msgspec.json.decode(text, type=StructuralTags)))


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame; None at the end."""
    head = stream.read(4)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 4 else None


def write_frame(stream: BinaryIO, frame: bytes) -> None:
    """Write a frame at once."""
    stream.write(len(frame).to_bytes(4, "little") + frame)
    stream.flush()


def _answer(tokenizer: llguidance.LLTokenizer, question: Question) -> Compiled:
    try:
        grammar = make_grammar(question.kind, question.text)
        matcher = compile_grammar(tokenizer, grammar)
        matcher.compute_bitmask()
        check_matcher(matcher)
    except GrammarError as exc:
        return Compiled(error=exc.message)
    except (ValueError, msgspec.MsgspecError, RecursionError, MemoryError) as exc:
        return Compiled(error=f"It is malformed: {' '.join(str(exc).split())[:300]}")
    return Compiled(grammar=grammar)


def _tags_grammar(tags: StructuralTags) -> str:
    """Free text in which each trigger begins one of the structures, as vLLM's and SGLang's structural tags."""
    structures = []
    for tag in tags.structures:
        trigger = next((trigger for trigger in tags.triggers if tag.begin.startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"none of the triggers begins {tag.begin[:100]!r}")
        structures.append(llguidance.StructTag(trigger=trigger, begin=tag.begin, grammar=tag.schema, end=tag.end))
    return llguidance.StructTag.to_grammar(structures, assume_special=False)


if __name__ == "__main__":
    main()

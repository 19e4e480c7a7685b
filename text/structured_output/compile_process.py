"""The process that turns constraints into grammars and tries them out.

    python -m tandem.text.structured_output.compile_process

A hostile schema may take hours in a call that nothing can interrupt, or all memory. So it is compiled here first, in a
fork that has the tokenizer. The kernel ends a fork that takes too much.

Frames of msgpack on stdin and stdout (`protocol/frames.py`). The first one is the text of a `tokenizer.json`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from typing import BinaryIO

import llguidance
import msgspec

from tandem.protocol.frames import framed, read_frame
from tandem.protocol.grammar import (
    GrammarError,
    check_matcher,
    compile_grammar,
    grammar_errors_only,
    make_grammar_tokenizer,
    num_forced_bytes,
)
from tandem.text.structured_output.closed_objects import closed_objects
from tandem.text.structured_output.lark_rules import check_pattern, lark_of, quoted
from tandem.text.structured_output.structural_tag import structural_tag_grammar

MAX_CPU_S = 1.0  # for one grammar
MAX_MEMORY_BYTES = 16 << 20  # for one grammar: a worker keeps those of all its requests
# Signals by which a grammar ends its process. Others, such as SIGKILL for lack of memory, say nothing about a grammar.
_CAUSES: dict[int, str] = {
    signal.SIGPROF: f"Compiling it takes more than {MAX_CPU_S:g} s.",
    signal.SIGABRT: f"Compiling it takes more than {MAX_MEMORY_BYTES >> 20} MiB.",
    signal.SIGSEGV: "It is nested too deeply.",
}
# A model that is unsure may write white space forever. This much is enough to indent a line.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"


class Question(msgspec.Struct):
    """A constraint; see `constraint.Constraint`."""

    kind: str
    text: str


class Compiled(msgspec.Struct):
    """The grammar in llguidance's form, or why it cannot be used. Neither of them: not known."""

    grammar: str = ""
    error: str = ""
    cpu_s: float = 0.0  # what compiling it took


def main() -> None:
    """Answer questions until the end of stdin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the router; this process ends with its stdin
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a router that was killed needs no answer, and no traceback
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer_json = read_frame(questions)
    if tokenizer_json is None:
        return
    tokenizer = make_grammar_tokenizer(msgspec.msgpack.decode(tokenizer_json, type=str), None, ())
    _send(answers, b"")  # ready
    while (frame := read_frame(questions)) is not None:
        _send(answers, answer_of_fork(tokenizer, msgspec.msgpack.decode(frame, type=Question)))


def _send(stream: BinaryIO, frame: bytes) -> None:
    stream.write(framed(frame))
    stream.flush()


def answer_of_fork(tokenizer: llguidance.LLTokenizer, question: Question) -> bytes:
    """The encoded `Compiled`, made by a child. If the child took too much and was ended, that is the answer."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _limit_this_process()
        with open(writer, "wb") as answer:
            compiled = _answer(tokenizer, question)
            compiled.cpu_s = time.process_time()  # since the fork
            answer.write(msgspec.msgpack.encode(compiled))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        encoded = answer.read()
    _, status, usage = os.wait4(pid, 0)
    exit_code = os.waitstatus_to_exitcode(status)
    if exit_code == 0:
        return encoded
    error = _CAUSES.get(-exit_code, "")
    return msgspec.msgpack.encode(Compiled(error=error, cpu_s=usage.ru_utime + usage.ru_stime))


def make_grammar(kind: str, text: str) -> str:
    """The grammar of a constraint, not compiled yet. Raises ValueError or MsgspecError for what is malformed."""
    matcher = llguidance.LLMatcher
    if kind == "llguidance":
        return text
    if kind == "json":
        schema = {} if (given := json.loads(text)) is True else given
        shown = json.dumps(closed_objects(schema) if isinstance(schema, dict) else schema, ensure_ascii=False)
        return matcher.grammar_from_json_schema(shown, overrides={"whitespace_pattern": WHITESPACE})
    if kind == "regex":
        check_pattern(text)
        return matcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        return matcher.grammar_from_lark("start: " + " | ".join(map(quoted, choices)))
    if kind == "grammar":
        return matcher.grammar_from_lark(lark_of(text))
    assert kind == "structural_tag", f"unknown kind {kind}"
    return structural_tag_grammar(text, WHITESPACE)


def _limit_this_process() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # a failing allocation would fill the router's log
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # SIGPROF, which nobody handles, ends the process
    with open("/proc/self/statm") as file:
        num_data_bytes = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (num_data_bytes + MAX_MEMORY_BYTES,) * 2)


def _answer(tokenizer: llguidance.LLTokenizer, question: Question) -> Compiled:
    try:
        with grammar_errors_only():  # without a verdict it would be asked for again
            return Compiled(_tried_grammar(tokenizer, question))
    except GrammarError as exc:
        return Compiled(error=exc.message)


def _tried_grammar(tokenizer: llguidance.LLTokenizer, question: Question) -> str:
    try:
        grammar = make_grammar(question.kind, question.text)
        matcher = compile_grammar(tokenizer, grammar)
        num_forced_bytes(matcher)
        matcher.compute_bitmask()
        check_matcher(matcher)
    except MemoryError as exc:
        raise GrammarError(_CAUSES[signal.SIGABRT]) from exc
    except (ValueError, msgspec.MsgspecError, RecursionError) as exc:
        raise GrammarError(f"It is malformed: {' '.join(str(exc).split())[:300]}") from exc
    return grammar


if __name__ == "__main__":
    main()

"""Grammars are compiled in a real process of its own, which ends if one takes too much."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import psutil
import pytest

from tandem.protocol.digest import cache_scope
from tandem.protocol.errors import InternalError, Overloaded
from tandem.protocol.frames import framed
from tandem.protocol.grammar import GrammarError, make_grammar_tokenizer
from tandem.protocol.sampling import MAX_GRAMMAR_CHARS
from tandem.text.structured_output import checker as checker_module
from tandem.text.structured_output import compile_process
from tandem.text.structured_output.checker import MAX_WAITING, GrammarChecker
from tandem.text.structured_output.constraint import Constraint
from tandem.text.tokenizer import Tokenizer
from tests.support.waiting import eventually

OBJECT = Constraint("json", '{"type": "object"}', "response_format")
HOSTILE = Constraint("json", '{"type": "integer", "multipleOf": 99999989}', "response_format")  # takes hours
SLOW = Constraint("json", '{"type": "integer", "multipleOf": 30011}', "response_format")  # a tenth of a second
TAG = '{"structures": [{"begin": "<f=x>", "end": "</f>", "schema": {"type": "object"}}], "triggers": ["<f="]}'


@pytest.fixture
async def checker(tokenizer: Tokenizer) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(tokenizer.to_json)
    yield made
    await made.close()


async def until_forked(pid: int) -> psutil.Process:
    parent = psutil.Process(pid)
    await eventually(parent.children)
    return parent.children()[0]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
        ("json", "true"),
        ("regex", "(yes|no)+"),
        ("choice", '["a", "say \\"b\\"", "é🎉", ""]'),
        ("choice", '["\\u0000", "\\n", "\\u001f", "\\u007f", "\\u0085", "\\u2028", "\\\\u0041"]'),
        ("regex", r"a\\"),
        ("grammar", 'root ::= "a" | "b" root'),
        ("grammar", 'start: "a"+'),
        ("grammar", "start[lazy]: /(a|c)*b/"),
        ("grammar", 'start: "::=" b\nb: "b"'),
        ("structural_tag", TAG),
    ],
)
async def test_what_can_be_kept_becomes_a_grammar(checker: GrammarChecker, kind: str, text: str) -> None:
    assert await checker.grammar(Constraint(kind, text, "x"), "t")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json", '{"type": 7}', "type must be"),
        ("json", '{"oneOf": [{"type": "string"}, {"minLength": 3, "type": "string"}]}', "oneOf"),
        ("json", '{"$ref": "http://127.0.0.1/schema"}', "http://127.0.0.1/schema"),
        ("json", '{"$ref": "file:///etc/passwd"}', "file:///etc/passwd"),
        ("json", "[" * 20_000 + "]" * 20_000, "recursion"),
        ("json", "{", "malformed"),
        ("regex", "(((", "unclosed group"),
        ("regex", "a\\", "ends with a backslash"),
        ("regex", "a\\\\\\", "ends with a backslash"),
        ("grammar", "start: ((", "Expected token"),
        ("grammar", 'a: "b"', "start"),
        ("grammar", 'root ::= "a" )', "malformed"),
        ("structural_tag", TAG.replace('["<f="]', '["<g="]'), "none of the triggers"),
        ("structural_tag", "{}", "structures"),
        ("structural_tag", r'{"format": {"type": "regex", "pattern": "a\\"}}', "ends with a backslash"),
    ],
)
async def test_a_wrong_grammar_is_refused_by_name(checker: GrammarChecker, kind: str, text: str, message: str) -> None:
    with pytest.raises(GrammarError, match="Invalid value for 'x'") as error:
        await checker.grammar(Constraint(kind, text, "x"), "t")
    assert message in error.value.message
    assert error.value.param == "x"


@pytest.mark.parametrize(
    ("kind", "text", "taken", "refused"),
    [
        ("json", '{"const": "%s"}', 4000, 5000),
        ("json", '{"enum": ["%s", "%s1"]}', 4000, 5000),
        ("grammar", 'start: "%s" /[0-9]/', 4000, 5000),
        ("regex", "%s", 4096, 4097),
    ],
)
async def test_a_fixed_text_is_bounded(checker: GrammarChecker, kind: str, text: str, taken: int, refused: int) -> None:
    """Each token within it would take as long as the rest of the text is."""
    assert await checker.grammar(Constraint(kind, text.replace("%s", "a" * taken), "x"), "t")
    with pytest.raises(GrammarError, match=r"no choice for \d+ bytes"):
        await checker.grammar(Constraint(kind, text.replace("%s", "a" * refused), "x"), "t")


async def test_a_grammar_that_takes_too_long_is_refused_and_others_go_on(checker: GrammarChecker) -> None:
    asked = [checker.grammar(one, "t") for one in (HOSTILE, OBJECT, HOSTILE)]
    first, second, third = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, GrammarError)
    assert "takes more than 16 MiB" in first.message
    assert isinstance(second, str)
    assert isinstance(third, GrammarError)  # known by then: nothing is compiled again
    process = checker.process
    assert await checker.grammar(Constraint("regex", "a", "x"), "t")
    assert (third.message, checker.process) == (first.message, process)


async def test_a_scope_does_not_learn_by_time_what_another_has_used(checker: GrammarChecker) -> None:
    paid: list[float] = []
    scopes = [cache_scope("", "a"), cache_scope("", "a"), cache_scope("", "b")]
    assert len({await checker.grammar(SLOW, "t", paid.append, scope) for scope in scopes}) == 1
    checker.check_integrity()
    assert len(paid) == 2


def test_a_grammar_that_takes_too_much_time_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_process, "MAX_CPU_S", 0.01)
    compiled = compile_process.answer_of_fork(
        make_grammar_tokenizer(tokenizer.to_json(), None, ()), compile_process.Question(SLOW.kind, SLOW.text)
    )
    assert "takes more than 1 s" in msgspec.msgpack.decode(compiled, type=compile_process.Compiled).error


def test_a_panic_is_a_verdict(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As Rust's panics come to Python."""

    def panic(*_: object) -> None:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(compile_process, "compile_grammar", panic)
    grammars = make_grammar_tokenizer(tokenizer.to_json(), None, ())
    frame = compile_process.answer_of_fork(grammars, compile_process.Question("regex", "a"))
    assert "index out of bounds" in msgspec.msgpack.decode(frame, type=compile_process.Compiled).error


def test_it_ends_without_a_word_if_the_router_dies_meanwhile(tokenizer: Tokenizer) -> None:
    sent = tokenizer.to_json(), compile_process.Question("regex", "a")
    questions = b"".join(framed(msgspec.msgpack.encode(one)) for one in sent)
    process = subprocess.Popen(
        [sys.executable, "-m", compile_process.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, told = process.communicate(questions, timeout=60)
    assert (told, process.returncode) == (b"", -signal.SIGPIPE)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_verdict_that_the_machine_prevents_is_not_kept(checker: GrammarChecker, number: int) -> None:
    await checker.grammar(OBJECT, "t")
    assert checker.process is not None
    asked = asyncio.ensure_future(checker.grammar(SLOW, "t"))
    fork = await until_forked(checker.process.pid)
    fork.send_signal(number)  # as the kernel does where no memory is left
    with pytest.raises(Overloaded, match="could not be checked now"):
        await asked
    assert await checker.grammar(SLOW, "t")


async def test_a_late_answer_is_not_kept(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    await checker.grammar(OBJECT, "t")
    with monkeypatch.context() as patched:
        patched.setattr(checker_module, "ANSWER_S", 0.0)
        with pytest.raises(Overloaded, match="could not be checked now"):
            await checker.grammar(SLOW, "t")
    assert await checker.grammar(SLOW, "t")


async def test_a_tenant_waits_for_one_grammar_of_each_other_tenant(checker: GrammarChecker) -> None:
    await checker.grammar(OBJECT, "t")
    done: list[str] = []

    async def ask(tenant: str, i: int) -> None:
        await checker.grammar(Constraint("regex", f"{tenant}{{{i + 1}}}", "x"), tenant)
        done.append(tenant)

    flood = [asyncio.ensure_future(ask("a", i)) for i in range(MAX_WAITING)]
    await asyncio.sleep(0)
    await asyncio.gather(ask("b", 0), ask("c", 0), *flood)
    assert {"b", "c"} <= set(done[:4])
    checker.check_integrity()
    assert not checker.num_waiting


async def test_a_process_that_dies_is_replaced(checker: GrammarChecker) -> None:
    await checker.grammar(OBJECT, "t")
    assert checker.process is not None
    checker.process.kill()
    await checker.process.wait()
    assert await checker.grammar(Constraint("regex", "a", "x"), "t")


async def test_a_request_that_is_given_up_does_not_leave_its_answer_to_another(checker: GrammarChecker) -> None:
    await checker.grammar(OBJECT, "t")
    assert checker.process is not None
    given_up = asyncio.ensure_future(checker.grammar(SLOW, "t"))
    await until_forked(checker.process.pid)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert await checker.grammar(Constraint("regex", "b", "x"), "t")


async def test_requests_that_leave_cost_others_no_new_process(checker: GrammarChecker) -> None:
    """To start the process takes longer than any constraint may take: a flood of them would stop all others."""
    await checker.grammar(OBJECT, "t")
    process = checker.process
    assert process is not None
    for i, prime in enumerate(("30011", "30013", "30029")):
        given_up = asyncio.ensure_future(checker.grammar(SLOW._replace(text=SLOW.text.replace("30011", prime)), "t"))
        await until_forked(process.pid)
        given_up.cancel()
        later = [Constraint("regex", f"c{{{j + 1}}}", "x") for j in range(4)]
        waiting = [asyncio.ensure_future(checker.grammar(constraint, "t")) for constraint in later]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()  # these leave before their turn: nothing is compiled for them
        await asyncio.gather(given_up, *waiting, return_exceptions=True)
        assert await checker.grammar(Constraint("regex", f"b{{{i + 1}}}", "x"), "other")
    assert checker.process is process
    assert not any(checker.keeps("regex", f"c{{{j + 1}}}") for j in range(4))
    checker.check_integrity()
    assert not checker.num_waiting


async def test_too_much_text_is_refused_unread(checker: GrammarChecker) -> None:
    with pytest.raises(GrammarError, match=f"at most {MAX_GRAMMAR_CHARS}"):
        await checker.grammar(Constraint("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "x"), "t")
    assert checker.process is None


async def test_a_flood_of_new_grammars_is_refused(checker: GrammarChecker) -> None:
    asked = [checker.grammar(Constraint("regex", f"a{{{i + 1}}}", "x"), "t") for i in range(MAX_WAITING + 5)]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, Overloaded) for answer in answers) == 5
    assert sum(isinstance(answer, str) for answer in answers) == MAX_WAITING


async def test_what_is_kept_is_bounded(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker_module, "MAX_KEPT_CHARS", 5000)
    for i in range(60):
        await checker.grammar(Constraint("regex", f"a{{{i + 1}}}", "x"), "t")
    checker.check_integrity()
    assert checker.num_kept_chars <= 5000
    assert checker.keeps("regex", "a{60}")


async def test_a_process_that_does_not_start_is_an_error_of_ours() -> None:
    checker = GrammarChecker(lambda: "no tokenizer")
    with pytest.raises(InternalError):
        await checker.grammar(OBJECT, "t")
    await checker.close()

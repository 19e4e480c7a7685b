"""Public function-calling cases in every format: written as models write them, read back, and held to their grammar.

    pip download --no-deps bfcl-eval && unzip bfcl_eval-*.whl -d bfcl
    python -m benchmarks.tool_formats --data bfcl/bfcl_eval/data --model MODEL_FOLDER

Each case has tools and the calls that answer it. The calls are written in the format, and then
- parsed at once and in random pieces: right = the same names and arguments;
- parsed by transformers' response parser, for `hermes` and `qwen3_coder`: agree = the same result;
- fed to the grammar that `tool_choice: "required"` makes of the tools: kept = the grammar takes them, refused = the
  grammar cannot be made. Cases whose calls do not fit their own schema count as neither.
- written as an engine would under that grammar: forced = the share of tokens that are the only ones allowed, and how
  many of them follow each other.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
from transformers.utils.chat_parsing import parse_response

from benchmarks.tool_texts import FORMS, Call, Case, read_cases
from tandem.protocol.grammar import GrammarError, compile_grammar, make_grammar_tokenizer
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.events import ToolCallArguments, ToolCallBegin
from tandem.text.tool_calls.formats import TOOL_FORMATS
from tandem.text.tool_calls.grammar import tool_call_grammar
from tandem.text.tool_calls.parser import AnswerParser


def main() -> None:
    """Print one line for each format."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--data", type=Path, required=True, help="folder of the BFCL_v4_*.json files")
    arguments.add_argument("--model", type=Path, required=True, help="folder of a model, for its tokenizer")
    arguments.add_argument("--format", nargs="*", choices=FORMS, default=list(FORMS), help="only these")
    options = arguments.parse_args()
    cases = list(read_cases(options.data))
    tokenizer = Tokenizer(options.model)
    text = (options.model / "tokenizer.json").read_text()
    grammars = make_grammar_tokenizer(text, None, [tokenizer.special_tokens["<|im_end|>"]])
    print(f"{len(cases)} cases, {sum(len(case.calls) for case in cases)} calls")
    for format in options.format:
        counts, seconds = _run(format, cases, tokenizer, grammars)
        tokens, written = max(1, counts.pop("tokens", 0)), max(1, counts.pop("written", 0))
        forced, runs = counts.pop("forced", 0), max(1, counts.pop("runs", 0))
        print(format, dict(counts), f"compile {seconds['compile'] / len(cases) * 1e3:.2f} ms a case,",
              f"mask {seconds['mask'] / tokens * 1e6:.0f} us a token,",
              f"forced {forced / written:.0%}, {forced / runs:.1f} in a row")  # fmt: skip


def _run(
    format: str, cases: list[Case], tokenizer: Tokenizer, grammars: llguidance.LLTokenizer
) -> tuple[Counter[str], dict[str, float]]:
    counts: Counter[str] = Counter()
    seconds = {"compile": 0.0, "mask": 0.0}
    rng = random.Random(1)
    for case in cases:
        calls = case.calls[: FORMS[format].max_calls]
        text = FORMS[format].text(calls)
        whole, pieces = _parsed(format, case, [text]), _parsed(format, case, _cut(text, rng))
        counts["right"] += whole == pieces == calls
        counts["wrong"] += not whole == pieces == calls
        if format in RESPONSE_TEMPLATES:
            counts["agree"] += _by_transformers(format, case, text) == whole
        counts[_grammar(format, case, text, tokenizer, grammars, counts, seconds)] += 1
    return counts, seconds


def _cut(text: str, rng: random.Random) -> Iterator[str]:
    while text:
        length = rng.randint(1, 8)
        yield text[:length]
        text = text[length:]


def _parsed(format: str, case: Case, pieces: Any) -> list[Call] | None:
    parser = AnswerParser(TOOL_FORMATS[FORMS[format].format], None, tools=case.tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    names: list[str] = []
    arguments: list[str] = []
    for event in events:
        if isinstance(event, ToolCallBegin):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, ToolCallArguments):
            arguments[event.index] += event.text
        else:
            return None
    return [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


def _by_transformers(format: str, case: Case, text: str) -> list[Call] | None:
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in case.tools.items()]
    message = parse_response(text, RESPONSE_TEMPLATES[format], prefix="", tools=tools)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


def _grammar(
    format: str,
    case: Case,
    text: str,
    tokenizer: Tokenizer,
    grammars: llguidance.LLTokenizer,
    counts: Counter[str],
    seconds: dict[str, float],
) -> str:
    """What becomes of the calls under the grammar of the tools: kept, refused, unfit."""
    name = FORMS[format].format
    ids = {"[ARGS]": tokenizer.vocab_size - 1} if format != name else {}  # the mark of the later form
    started = time.perf_counter()
    try:
        grammar = tool_call_grammar(
            TOOL_FORMATS[name], case.tools, max_calls=None, reasoning=None, is_reasoning_open=False, special_ids=ids
        )
        matcher = compile_grammar(grammars, grammar)
        matcher.compute_bitmask()
    except (GrammarError, ValueError):
        return "refused"
    finally:
        seconds["compile"] += time.perf_counter() - started
    if ids:
        return "not tried"  # this vocabulary has no such tokens
    _count_forced(matcher.deep_copy(), text, tokenizer, grammars, counts)
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        started = time.perf_counter()
        matcher.compute_bitmask()
        seconds["mask"] += time.perf_counter() - started
        counts["tokens"] += 1
        if not matcher.consume_token(token_id):
            return "unfit"
    return "kept" if matcher.is_accepting() else "unfit"


_FUNCTION = {"type": "function", "function": "{content}"}
RESPONSE_TEMPLATES: dict[str, dict[str, Any]] = {
    "hermes": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True,
                           "content": "json", "transform": _FUNCTION},
            "content": {"content": "text"},
        },
    },
    "qwen3_coder": {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"content": "text"},
        },
    },
}  # fmt: skip


def _count_forced(
    matcher: llguidance.LLMatcher,
    text: str,
    tokenizer: Tokenizer,
    grammars: llguidance.LLTokenizer,
    counts: Counter[str],
) -> None:
    """Write the text under its grammar, each token that is forced as the grammar forces it."""
    rest, was_forced = text.encode(), False
    while rest and not matcher.is_stopped():
        forced = matcher.compute_ff_tokens()[:1]
        shown = rest.decode(errors="ignore")  # a forced token may end within a character
        [token_id] = forced or tokenizer.encode(shown, add_special_tokens=False)[:1]
        if not matcher.consume_token(token_id):
            return  # the text does not fit
        counts["written"] += 1
        counts["forced"] += bool(forced)
        counts["runs"] += bool(forced) and not was_forced
        was_forced = bool(forced)
        rest = rest[len(grammars.decode_bytes([token_id])) :]


if __name__ == "__main__":
    main()

"""Our parsers of tool calls and reasoning beside vLLM's, on the same texts and the same pieces of them.

    python -m benchmarks.tool_parsers write texts.jsonl --data bfcl/bfcl_eval/data
    VLLM_PYTHON -P benchmarks/tool_parsers_vllm.py texts.jsonl results.jsonl --model MODEL_FOLDER
    python -m benchmarks.tool_parsers compare texts.jsonl results.jsonl [--show KIND]

`benchmarks.tool_formats` says how to get the cases. Each of them is written as models write it (kind `plain`). Every
twentieth is also written with text around it, with hostile values, cut short, broken, or with reasoning before it. For
each format and kind the comparison prints:
- texts, and of them:
- ours, whole, streamed: the calls, content and reasoning that the text was made of came out: of our parser (from the
  whole text and from the pieces alike), of vLLM's parser from the whole text, and of vLLM's from the pieces. Only where
  the text was made of something: a broken text is not.
- =whole, =streamed: vLLM's calls, content and reasoning are equal to ours; `~` counts them if only calls are compared.
- vLLM's: whole and streamed results of vLLM's parser are equal; raised: either of them raised an error.
Results may be fewer than texts: then the first ones are compared. White space around content and reasoning is not
compared. Arguments are compared as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tool_texts import FORMS, Call, CallForm, Case, read_cases
from tandem.text.tool_calls.events import Content, Reasoning, ToolCallArguments, ToolCallBegin
from tandem.text.tool_calls.formats import TOOL_FORMATS
from tandem.text.tool_calls.harmony import HARMONY_MARKERS
from tandem.text.tool_calls.parser import AnswerParser
from tandem.text.tool_calls.reasoning import REASONING_FORMATS

SEED = 1
VARIED = 20  # every 20th case is also written in all other ways
COLUMNS = ("texts", "ours", "whole", "streamed", "=whole", "=streamed", "~whole", "~streamed", "vLLM's", "raised")


class Peer(NamedTuple):
    """The names that vLLM has for a format."""

    tool_parser: str
    reasoning_parser: str = "qwen3"
    reasoning: str = "think"  # our name of the reasoning format
    left_out: tuple[str, ...] = ()  # marks that are missing in the form's vocabulary


PEERS = {
    "hermes": Peer("hermes"),
    "llama3_json": Peer("llama3_json"),
    "mistral": Peer("mistral", "mistral", "mistral", ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")),
    "mistral_v11": Peer("mistral", "mistral", "mistral"),
    "pythonic": Peer("pythonic"),
    "qwen3_coder": Peer("qwen3_coder"),
    "harmony": Peer("openai", "openai_gptoss", "harmony"),
    "seed_oss": Peer("seed_oss", "seed_oss", "seed_oss"),
    "minimax_m2": Peer("minimax_m2", "minimax_m2"),
    "glm45": Peer("glm45", "glm45"),
    "deepseek_v3": Peer("deepseek_v3"),
    "deepseek_v31": Peer("deepseek_v31"),
    "deepseek_v32": Peer("deepseek_v32"),
    "deepseek_v4": Peer("deepseek_v4", "deepseek_v4"),
    "kimi_k2": Peer("kimi_k2", "kimi_k2"),
}
STRINGS = (
    'a "b" {c} [d',
    "é € 😀 \u2028",
    "line\n\tline\\n \\",
    "it's </b> & <i>",
    "  spaces  ",
    "",
    "true",
    "12",
    "null",
)


_MARK = "|".join(map(re.escape, HARMONY_MARKERS))
_QUOTED = re.compile(f"a({_MARK})b")  # as `_hostile` writes them: ordinary tokens, not those of the marks


class Answer(NamedTuple):
    """The parts of a text. Calls are names and arguments as text."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]

    @property
    def compared(self) -> tuple[str, str, list[tuple[str, Any]]]:
        """The parts in the form in which they are compared."""
        return self.reasoning.strip(), self.content.strip(), [(name, _decoded(text)) for name, text in self.calls]


class Text(NamedTuple):
    """A text, and the parts that it was made of; None = the text was broken on purpose."""

    text: str
    made_of: Answer | None
    is_reasoning: bool = False
    prompt_end: str = ""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arguments.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write")
    write.add_argument("texts", type=Path)
    write.add_argument("--data", type=Path, required=True, help="folder of the BFCL_v4_*.json files")
    write.add_argument("--format", choices=PEERS, help="only this one")
    write.add_argument("--every", type=int, default=1, help="only each n-th case")
    compare = commands.add_parser("compare")
    compare.add_argument("texts", type=Path)
    compare.add_argument("results", type=Path)
    compare.add_argument("--show", metavar="FORMAT/KIND", help="print the texts of this kind that differ")
    options = arguments.parse_args()
    if options.command == "write":
        _write(options.texts, options.data, options.format, options.every)
    else:
        _compare(options.texts, options.results, options.show or "")


# -- writing


def _write(path: Path, data: Path, only: str | None, every: int) -> None:
    rng = random.Random(SEED)
    items = [
        _item(form, kind, case, text)
        for form in ([only] if only else PEERS)
        for number, case in enumerate(list(read_cases(data))[::every])
        for kind, text in _texts(form, case, rng, is_varied=number % VARIED == 0)
    ]
    rng.shuffle(items)  # the first ones are a sample
    path.write_text("".join(json.dumps({"id": i, **item}) + "\n" for i, item in enumerate(items)))
    print(f"{len(items)} texts")


def _item(form: str, kind: str, case: Case, text: Text) -> dict[str, Any]:
    peer = PEERS[form]
    tool_format = TOOL_FORMATS[FORMS[form].format]
    own = (FORMS[form].opening.strip(), FORMS[form].closing) if "DSML" in FORMS[form].opening else ()
    markers = (*own, *tool_format.markers, *REASONING_FORMATS[peer.reasoning].markers)
    has_reasoning = text.is_reasoning or form == "harmony"
    return {
        "form": form,
        "kind": kind,
        "text": text.text,
        "made_of": text.made_of,
        "prompt_end": text.prompt_end,
        "tools": [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in case.tools.items()],
        "quoted": [found.start(1) for found in _QUOTED.finditer(text.text)] if form == "harmony" else [],
        "marks": [] if form == "harmony" else [one for one in markers if one not in peer.left_out],
        "tool_parser": peer.tool_parser,
        "reasoning_parser": peer.reasoning_parser if has_reasoning else None,
        "reasoning": peer.reasoning if has_reasoning else None,
    }


def _texts(name: str, case: Case, rng: random.Random, *, is_varied: bool) -> Iterator[tuple[str, Text]]:
    """The texts of a case, one for each way to write it."""
    form = FORMS[name]
    calls = case.calls[: form.max_calls]
    text = form.text(calls)
    yield "plain", Text(text, _made_of(calls))
    if not is_varied:
        return
    yield "cut", Text(text[: rng.randrange(len(text))], None)
    yield "broken", Text(_broken(text, rng), None)
    yield "no end", Text(text.removesuffix(form.closing) if form.closing else text[: text.rfind("<")], None)
    yield "no arguments", _with_calls(form, [(calls[0][0], {})])
    yield "unknown name", _with_calls(form, [("no_such_tool", calls[0][1])])
    yield "strings", _with_calls(form, [(calls[0][0], _hostile(calls[0][1], STRINGS, rng))])
    yield "marks", _with_calls(form, [(calls[0][0], _hostile(calls[0][1], TOOL_FORMATS[form.format].markers, rng))])
    yield from _around(name, form, text, calls)
    yield from _with_reasoning(name, text, calls)


def _with_calls(form: CallForm, calls: list[Call]) -> Text:
    return Text(form.text(calls), _made_of(calls))


def _around(name: str, form: CallForm, text: str, calls: list[Call]) -> Iterator[tuple[str, Text]]:
    """Content beside the calls, where the format has room for it."""
    if name == "harmony":
        start = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
        yield "text before", Text(start + text, _made_of(calls, "I will look."))
        yield "no call", Text("<|channel|>final<|message|>Hello, {you}.", _made_of([], "Hello, {you}."))
        return
    yield "no call", Text("Hello, [you] <b> {x}.", _made_of([], "Hello, [you] <b> {x}."))
    yield "text after", Text(f"{text}\n\nDone.", _made_of(calls, "Done."))
    if name not in ("llama3_json", "pythonic"):  # there calls are the whole answer
        yield "text before", Text(f"I will look.\n\n{text}", _made_of(calls, "I will look."))
        both = form.text(calls[:1]), form.text(calls[:1])
        yield "text between", Text("\nand\n".join(both), _made_of(calls[:1] * 2, "and"))


def _with_reasoning(name: str, text: str, calls: list[Call]) -> Iterator[tuple[str, Text]]:
    thought = "I need it.\n\nLet me see: {a} < b."
    if name == "harmony":
        before = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        yield "reasoning", Text(before + text, _made_of(calls, "", thought))
        yield "reasoning cut", Text(f"<|channel|>analysis<|message|>{thought}", _made_of([], "", thought))
        return
    if name == "mistral":
        return  # its vocabulary has no marks for it
    opening, closing = REASONING_FORMATS[PEERS[name].reasoning].markers
    yield "reasoning", Text(f"{opening}\n{thought}\n{closing}\n\n{text}", _made_of(calls, "", thought), True)
    prompt = f"assistant\n{opening}\n"
    yield "reasoning open", Text(f"{thought}\n{closing}\n\n{text}", _made_of(calls, "", thought), True, prompt)
    yield "reasoning cut", Text(f"{opening}\n{thought}", _made_of([], "", thought), True)
    skipped = f"assistant\n{opening}\n\n{closing}\n\n"
    yield "reasoning skipped", Text(text, _made_of(calls), True, skipped)
    yield "reasoning, no call", Text(f"{thought}\n{closing}\n\nHello.", _made_of([], "Hello.", thought), True, prompt)


def _made_of(calls: Iterable[Call], content: str = "", reasoning: str = "") -> Answer:
    return Answer(reasoning, content, tuple((name, json.dumps(arguments)) for name, arguments in calls))


def _hostile(arguments: dict[str, Any], values: tuple[str, ...], rng: random.Random) -> dict[str, Any]:
    """The arguments with other strings, at least one."""
    strings = [key for key, value in arguments.items() if isinstance(value, str)] or ["text"]
    return {**arguments, **{key: f"a{rng.choice(values)}b" for key in strings}}


def _broken(text: str, rng: random.Random) -> str:
    """The text without one of its signs."""
    place = rng.choice([i for i, char in enumerate(text) if char in "{}[]()\"':,<>|=/"])
    return text[:place] + text[place + 1 :]


# -- comparing


def _compare(texts: Path, results: Path, shown: str) -> None:
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    with texts.open() as items, results.open() as theirs:
        for line, result in zip(items, theirs, strict=False):
            item, result = json.loads(line), json.loads(result)
            key = item["form"], item["kind"]
            _count(item, result, counts[key], is_shown=shown == "/".join(key))
            seconds[item["form"]] += Counter({name: result[name] for name in ("whole_s", "streamed_s")})
    for key, count in [*counts.items(), (("all", ""), sum(counts.values(), Counter()))]:
        print(f"{' '.join(key):32}", *(f"{name} {count[name]:5}" for name in COLUMNS))


def _count(item: dict[str, Any], result: dict[str, Any], counts: Counter[str], *, is_shown: bool) -> None:
    ours = _parsed(item, [item["text"]])
    assert _parsed(item, result["pieces"]) == ours, item["text"]
    whole, streamed = (_answer(result[name]) for name in ("whole", "streamed"))
    counts["texts"] += 1
    if item["made_of"]:
        expected = _answer_of(*item["made_of"]).compared
        for name, one in (("ours", ours), ("whole", whole), ("streamed", streamed)):
            counts[name] += one is not None and one.compared == expected
    for name, one in (("whole", whole), ("streamed", streamed)):
        counts[f"={name}"] += one is not None and one.compared == ours.compared
        counts[f"~{name}"] += one is not None and one.compared[2] == ours.compared[2]
    counts["vLLM's"] += whole is not None and streamed is not None and whole.compared == streamed.compared
    counts["raised"] += whole is None or streamed is None
    if is_shown and not (whole and streamed and whole.compared == streamed.compared == ours.compared):
        print(json.dumps(item["text"], ensure_ascii=False))
        for name, shown in (("ours", ours), ("whole", result["whole"]), ("streamed", result["streamed"])):
            print(f"    {name:8}", shown)


def _parsed(item: dict[str, Any], pieces: list[str]) -> Answer:
    """The parts that our parser finds in a text that comes in these pieces."""
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in item["tools"]}
    reasoning = REASONING_FORMATS.get(item["reasoning"] or "")
    tool_format = TOOL_FORMATS[FORMS[item["form"]].format]
    is_harmony = item["form"] == "harmony"
    parser = AnswerParser(
        tool_format,
        reasoning,
        tools=tools,
        prompt_end=item["prompt_end"],
        hidden=item["marks"],
        tokens=HARMONY_MARKERS if is_harmony else (),
    )
    if is_harmony:
        parser.add_marks({found.start() for found in re.finditer(_MARK, item["text"])} - set(item["quoted"]))
    texts = {Content: "", Reasoning: ""}
    calls: list[tuple[str, str]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        if isinstance(event, ToolCallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
        else:
            texts[type(event)] += event.text
    return Answer(texts[Reasoning], texts[Content], tuple(calls))


def _answer(shown: dict[str, Any]) -> Answer | None:
    return None if "error" in shown else _answer_of(shown["reasoning"], shown["content"], shown["calls"])


def _answer_of(reasoning: str, content: str, calls: list[list[str]]) -> Answer:
    return Answer(reasoning, content, tuple((name, arguments) for name, arguments in calls))


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()

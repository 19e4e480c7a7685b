"""What drafts give, and what they cost where they do not pay: `--speculate auto` beside `off`, in turn.

    python -m benchmarks.speculation

Two engines of one process answer the same requests, and each round gives the ratio of their tokens a second; each goes
first as often as last. Every answer is compared token for token.

Code edit: repeat a module of this repository with one name changed. The module is the request's prediction, and its
first six lines are given, because so small a model would not begin to repeat it.
Summary: sum up a document of this repository, with quotes. JSON: records out of such a document, by a grammar.
Chat: questions, with temperature 0.7.

A round has prompts and a cache scope of its own, so that no answer is drafted from the same one of an earlier round.

With --vllm-python two servers of vLLM answer the same requests afterwards, one with its drafts (method `ngram`), one
without; they have no predictions.

Stands behind docs/benchmarks.md. Exit code 1 if answers differ.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import vllm
from benchmarks.common import (
    Server,
    arguments,
    console,
    print_rows,
    ratio,
    verdict,
    write_result,
)
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence
from tandem.loadtest.client import run_measured
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams
from tandem.text.structured_output.compile_process import make_grammar
from tandem.text.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parent.parent
_POOL_BYTES = 800_000_000
_MOST_CHARS = 2400  # of a text in a prompt
_RECORD = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "first_sentence": {"type": "string"},
        "last_sentence": {"type": "string"},
        "names": {"type": "array", "items": {"type": "string"}, "maxItems": 6},
    },
    "required": ["title", "first_sentence", "last_sentence", "names"],
    "additionalProperties": False,
}
_QUESTIONS = (
    "Why is the sky blue, and why are sunsets red?",
    "Give me a plan for a three-day trip to Lisbon with two children.",
    "Explain to a beginner what a hash table is and when to use one.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "What should I cook tonight with rice, two eggs, spinach and cheese?",
    "How do vaccines work? Please keep it simple.",
    "Compare electric cars and petrol cars for someone who drives little.",
    "Write a friendly message to my neighbours about a party on Saturday.",
)
_NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_AIMS = {"code edit": 1.6, "summary with quotes": 1.6, "JSON by grammar": 1.6, "chat": 0.99}


class Task(NamedTuple):
    """A request but for its length."""

    messages: list[dict[str, str]]
    sampling: dict[str, Any]
    begun: str = ""  # the beginning of the answer
    schema: str = ""  # what it must fit


class Run(NamedTuple):
    """One round of one engine."""

    num_tokens: int  # of the steps that were measured
    tokens_per_s: float
    tokens_per_cpu_s: float
    num_steps: int
    answers: list[list[int]]


_Kind = tuple[str, int]  # and how many streams


def code_edit(source: random.Random, tokenizer: Tokenizer) -> Task:
    """A module with one of its names to be changed everywhere."""
    text = ""
    while not (names := sorted({*re.findall(r"\b[a-z]+_[a-z_]+\b", text)})):
        text = _text(source, "scheduling", ".py")
    name = source.choice(names)
    ask = f"Rename `{name}` to `renamed_{name}` in this file. Answer with the whole file.\n\n```python\n{text}\n```"
    begun = "```python\n" + "".join(text.splitlines(keepends=True)[:6])
    return Task(
        _asked(ask), {"prediction": tuple(tokenizer.encode(f"```python\n{text}\n```", add_special_tokens=False))}, begun
    )


def summary(source: random.Random, _: Tokenizer) -> Task:
    """A document to be summed up."""
    ask = "Summarize this document. Quote its most important sentences word for word.\n\n"
    return Task(_asked(ask + _text(source, "docs", ".md")), {})


def json_records(source: random.Random, _: Tokenizer) -> Task:
    """Parts of a document as JSON."""
    ask = "Answer in JSON: title, first and last sentence of this document, and names of files in it.\n\n"
    return Task(_asked(ask + _text(source, "docs", ".md")), {}, schema=json.dumps(_RECORD))


def chat(source: random.Random, _: Tokenizer) -> Task:
    """A question."""
    ask = source.choice(_QUESTIONS)
    return Task(_asked(f"My name is {source.randrange(10**6)}. {ask}"), {"temperature": 0.7, "top_p": 0.95})


KINDS: dict[str, tuple[Callable[[random.Random, Tokenizer], Task], tuple[int, ...]]] = {
    "code edit": (code_edit, (1, 8)),
    "summary with quotes": (summary, (1, 8)),
    "JSON by grammar": (json_records, (1, 8)),
    "chat": (chat, (1, 8, 32)),
}


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--rounds", 6, quick=1)
    parser.option("--tokens", 128, "of each answer, at most", quick=32)
    parser.option("--threads", 0, "of both engines; 0 = as many as torch chooses")
    parser.option("--kinds", list(KINDS), choices=KINDS)
    parser.option("--streams", [1, 8, 32], "at once")
    parser.option("--vllm-python", "", vllm.HELP)
    settings = parser.settings()
    folder = resolve_model(settings.model, report=console.print)
    tokenizer = Tokenizer(folder)
    engines = {name: _engine(folder, name, settings.threads) for name in ("off", "auto")}
    counts = [(kind, num) for kind in settings.kinds for num in KINDS[kind][1] if num in settings.streams]
    results: list[dict[str, Any]] = []
    for kind, num in counts:
        results.append(measure(engines, tokenizer, settings, kind, num))
        console.print(f"[dim]measured {kind} at {num}: {results[-1]['ratio']:.2f}, {results[-1]['CPU']:.2f} by CPU[/]")
    print_rows("--speculate auto beside off", results, "different: answers, aim 0")
    theirs = run_measured(measure_vllm(tokenizer, settings, counts)) if settings.vllm_python else []
    if theirs:
        print_rows("vLLM with its drafts beside without", theirs)
    write_result("speculation", settings, [*results, *theirs])
    return int(any(result["different"] for result in results))


def measure(
    engines: dict[str, Engine], tokenizer: Tokenizer, settings: argparse.Namespace, kind: str, num_streams: int
) -> dict[str, Any]:
    """Rounds of this many streams at once, in turn by both engines; drafted and accepted tokens are those of all."""
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    speculator = engines["auto"].speculator
    assert speculator is not None
    before = speculator.num_drafted, speculator.num_accepted
    for number in range(settings.rounds):
        for name in list(engines) if number % 2 else list(engines)[::-1]:
            scope = f"{kind} {num_streams} {number}"
            tasks = _tasks(settings, tokenizer, (kind, num_streams), number)
            added = [_add(engines[name], tokenizer, task, settings.tokens, scope) for task in tasks]
            runs[name].append(run(engines[name], added))
    off, auto = runs["off"], runs["auto"]
    both = list(zip(auto, off, strict=True))
    ratios = [ratio(one.tokens_per_s, other.tokens_per_s) for one, other in both]
    cpu_ratios = [ratio(one.tokens_per_cpu_s, other.tokens_per_cpu_s) for one, other in both]
    pairs = [pair for one, other in both for pair in zip(one.answers, other.answers, strict=True)]
    num_tokens, num_steps = sum(one.num_tokens for one in auto), sum(one.num_steps for one in auto)
    median_ratio, has_aim = statistics.median(ratios), kind == "chat" or num_streams == 1
    return {
        "": kind,
        "streams": num_streams,
        "off tok/s": statistics.median(one.tokens_per_s for one in off),
        "auto tok/s": statistics.median(one.tokens_per_s for one in auto),
        "ratio": median_ratio,
        "least": min(ratios),
        "most": max(ratios),
        "CPU": statistics.median(cpu_ratios),  # what the ratio would be on a machine without other work
        "tok/step": num_tokens / num_steps / num_streams,  # of `auto`
        "drafted": speculator.num_drafted - before[0],
        "accepted": speculator.num_accepted - before[1],
        "aim": verdict(f">= {_AIMS[kind]}", median_ratio >= _AIMS[kind]) if has_aim else "-",
        "different": sum(mine != theirs for mine, theirs in pairs),
    }


def run(engine: Engine, sequences: Collection[Sequence]) -> Run:
    """Run until all sequences have ended. What is measured begins behind the prompts and ends with the first of them:
    a server would give its place to the next request.
    """
    while engine.has_work and not all(sequence.has_first_token for sequence in sequences):
        engine.step()
    num_before, num_steps = sum(sequence.num_output_tokens for sequence in sequences), 0
    began, cpu_began = time.perf_counter(), time.process_time()
    while len(engine.sequences) == len(sequences):
        num_steps += len(engine.step())
    elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    num_tokens = sum(sequence.num_output_tokens for sequence in sequences) - num_before
    while engine.has_work:
        engine.step()
    answers = [sequence.output_ids for sequence in sequences]
    return Run(num_tokens, num_tokens / elapsed_s, num_tokens / cpu_s, num_steps, answers)


async def measure_vllm(tokenizer: Tokenizer, settings: argparse.Namespace, counts: list[_Kind]) -> list[dict[str, Any]]:
    """The same rounds by two servers of vLLM, in turn, for each kind and number of streams."""
    with contextlib.ExitStack() as stack:
        drafts = {"off": (), "ngram": ("--speculative-config", json.dumps(_NGRAM))}
        starting = {name: vllm.colocated(settings, *flags, name=f"vLLM {name}") for name, flags in drafts.items()}
        servers = {name: stack.enter_context(server) for name, server in starting.items()}
        return [await _measure_vllm(servers, tokenizer, settings, kind) for kind in counts]


async def _measure_vllm(
    servers: dict[str, Server], tokenizer: Tokenizer, settings: argparse.Namespace, kind: _Kind
) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(-1, settings.rounds):  # the first one is not counted
        for name in list(servers) if number % 2 else list(servers)[::-1]:
            tasks = _tasks(settings, tokenizer, kind, number)
            speeds[name].append(await _speed(servers[name], tokenizer, tasks, settings.tokens))
    off, ngram = speeds["off"][1:], speeds["ngram"][1:]
    ratios = [ratio(one, other) for one, other in zip(ngram, off, strict=True)]
    medians = {"off tok/s": statistics.median(off), "ngram tok/s": statistics.median(ngram)}
    spread = {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return {"": kind[0], "streams": kind[1]} | medians | spread


async def _speed(server: Server, tokenizer: Tokenizer, tasks: list[Task], max_tokens: int) -> float:
    """Tokens a second from when all streams have begun, as `run` counts them."""
    streams = []
    for task in tasks:
        fields: dict[str, Any] = {"temperature": 0.0, "seed": 1, **task.sampling, "model": server.model}
        fields.pop("prediction", None)
        if task.schema:
            fields["structured_outputs"] = {"json": json.loads(task.schema)}
        prompt = _prompt(tokenizer, task)
        streams.append(server.client.stream_completion(prompt, max_tokens=max_tokens, **fields))
    timings = await asyncio.gather(*streams)
    if error := next((timing.error for timing in timings if timing.error), ""):
        raise RuntimeError(f"{server.name}: {error}")
    began_s = max(timing.event_times_s[0] for timing in timings)
    events = [event for timing in timings for event in zip(timing.event_times_s, timing.event_tokens, strict=True)]
    num_tokens = sum(count for at_s, count in events if at_s > began_s)
    return num_tokens / (max(at_s for at_s, _ in events) - began_s)


def _tasks(settings: argparse.Namespace, tokenizer: Tokenizer, kind: _Kind, number: int) -> list[Task]:
    """Those of a round."""
    name, num_streams = kind
    source = random.Random(f"{settings.seed} {name} {num_streams} {number}")
    return [KINDS[name][0](source, tokenizer) for _ in range(num_streams)]


def _prompt(tokenizer: Tokenizer, task: Task) -> list[int]:
    text = tokenizer.render_chat(task.messages, {"add_generation_prompt": True}) + task.begun
    return tokenizer.encode(text, add_special_tokens=False)


def _add(engine: Engine, tokenizer: Tokenizer, task: Task, max_tokens: int, scope: str) -> Sequence:
    grammar = {"grammar": make_grammar("json", task.schema)} if task.schema else {}
    sampling = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "seed": 1, **task.sampling, **grammar})
    token_ids = _prompt(tokenizer, task)
    sequence = engine.factory.make_sequence(f"{scope} {len(engine.sequences)}", token_ids, sampling, cache_salt=scope)
    engine.add(sequence)
    return sequence


def _engine(folder: Path, speculate: str, num_threads: int) -> Engine:
    settings: dict[str, Any] = {"speculate": speculate, "num_threads": num_threads, "pool_bytes": _POOL_BYTES}
    return Engine(EngineConfig(model=str(folder), device="cpu", **settings))


def _asked(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _text(source: random.Random, folder: str, suffix: str) -> str:
    """The beginning of one of the repository's files."""
    paths = sorted(path for path in (_ROOT / folder).rglob(f"*{suffix}") if path.stat().st_size > _MOST_CHARS)
    return source.choice(paths).read_text()[:_MOST_CHARS]


if __name__ == "__main__":
    sys.exit(main())

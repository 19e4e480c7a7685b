"""Structured output: what masks cost, whether outputs match their schemas, and what hostile grammars can take.

    python -m benchmarks.structured_output [--suite FOLDER]

Masks: microseconds for a token's mask, along real outputs. Streams: decode steps of an engine all of whose streams have
a grammar, beside the same streams without one, in turn. Schemas: each schema of a folder of the public JSON Schema Test
Suite (`tests/draft2020-12` of its repository; the source package of `jsonschema` has it as `json/tests`) is checked as
the router does, an output is sampled for it, and `jsonschema` judges the output. Hostile: what the router's check
and a worker's step take at most.

Stands behind docs/structured_output.md: how many schemas are served, and what no grammar may take.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import torch

from benchmarks.common import arguments, console, print_rows, ratio, write_result
from benchmarks.speculation import run
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.engine.sequence import Sequence
from tandem.engine.structured_output import GrammarMatcher
from tandem.loadtest.stats import Distribution
from tandem.protocol.config import EngineConfig
from tandem.protocol.errors import RequestError
from tandem.protocol.messages import FinishReason
from tandem.protocol.sampling import SamplingParams
from tandem.text.structured_output.checker import GrammarChecker
from tandem.text.structured_output.compile_process import make_grammar
from tandem.text.structured_output.constraint import Constraint
from tandem.text.tokenizer import Tokenizer

_ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["new", "used"]}},
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_KINDS: dict[str, tuple[str, str]] = {
    "any JSON object": ("json", '{"type": "object"}'),
    "list of records": ("json", json.dumps({"type": "array", "items": _ITEM, "minItems": 50})),
    "regular expression": ("regex", r"[A-Z][a-z ,]{400,600}\."),
    "free text with tags": (
        "structural_tag",
        json.dumps({"structures": [{"begin": "<call>", "end": "</call>", "schema": _ITEM}], "triggers": ["<call>"]}),
    ),
}
_HOSTILE: dict[str, tuple[str, str]] = {
    "multiple of a large prime": ("json", '{"type": "integer", "multipleOf": 99999989}'),
    "ambiguous grammar": ("grammar", 'start: e\ne: e e | "a" | "b" e | e "c" |'),
    "nested repetition": ("grammar", 'start: (x{1,1000}){1,1000}\nx: "a"'),
    "1,000 alternatives": (
        "json",
        json.dumps({"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(1000)]}),
    ),
    "optional characters": ("regex", "(a?){5000}a{5000}"),
    "look back": ("regex", ".*a.{20}"),
    "2,000 optional properties": (
        "json",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}),
    ),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--suite", type=Path, help="folder of JSON files of the JSON Schema Test Suite")
    parser.option("--rounds", 9, quick=1)
    parser.option("--tokens", 96, "of each stream", quick=16)
    settings = parser.settings()
    torch.set_num_threads(1)
    folder = resolve_model(settings.model, report=console.print)
    engine = Engine(EngineConfig(model=str(folder), device="cpu", num_threads=1))
    masks = [measure_masks(engine, settings, kind) for kind in _KINDS]
    print_rows("A mask, after the token before it", masks)
    streams = [measure_streams(engine, settings, kind, num) for kind in list(_KINDS)[1:3] for num in (1, 8)]
    print_rows("Steps with a grammar for every stream", streams)
    tokenizer = Tokenizer(folder)
    attacks = asyncio.run(measure_attacks(engine, tokenizer))
    print_rows("Hostile grammars", attacks)
    schemas = asyncio.run(run_suite(engine, tokenizer, settings)) if settings.suite else {}
    print_rows("Schemas of the suite by outcome", [schemas])
    engine.close()
    results = {"masks": masks, "streams": streams, "attacks": attacks, "schemas": schemas}
    write_result("structured_output", settings, results)


def measure_masks(engine: Engine, settings: argparse.Namespace, kind: str) -> dict[str, Any]:
    """Microseconds for a mask along sampled outputs, consumption of the token before it included."""
    sequences = [_ask(engine, kind, settings.tokens, seed=seed) for seed in range(4)]
    answers = run(engine, sequences).answers
    grammar, seconds = make_grammar(*_KINDS[kind]), []
    for answer in answers:
        matcher: GrammarMatcher = engine.structured_output.matcher(grammar)
        for token_id in answer:
            begun = time.perf_counter()
            matcher.follow([]).compute_bitmask()
            matcher.follow([token_id])
            seconds.append(time.perf_counter() - begun)
    took = Distribution.of(seconds)
    micros = {"median us": 1e6 * took.p50, "p99 us": 1e6 * took.p99, "most us": 1e6 * took.max}
    return {"": kind, "masks": took.count, **micros}


def measure_streams(engine: Engine, settings: argparse.Namespace, kind: str, num_streams: int) -> dict[str, Any]:
    """Streams with and without a grammar in turn, each going first as often as last."""
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(settings.rounds + 1):  # the first one warms up
        for is_structured in (False, True) if number % 2 else (True, False):
            asked = kind if is_structured else ""
            sequences = [_ask(engine, asked, settings.tokens, seed=seed) for seed in range(num_streams)]
            speeds[is_structured].append(run(engine, sequences).tokens_per_s)
    plain, structured = speeds[False][1:], speeds[True][1:]
    ratios = [ratio(one, other) for one, other in zip(structured, plain, strict=True)]
    tokens_per_s = {"plain tok/s": statistics.median(plain), "structured tok/s": statistics.median(structured)}
    return {"": kind, "streams": num_streams, **tokens_per_s, "ratio": statistics.median(ratios)}


async def measure_attacks(engine: Engine, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What each hostile grammar takes of the router's check, and of a worker's step if it passes."""
    checker, attacks = GrammarChecker(tokenizer.to_json), []
    await checker.grammar(Constraint("regex", "a", "warm-up"), "bench")
    for kind, (form, text) in _HOSTILE.items():
        begun = time.perf_counter()
        try:
            grammar, verdict = await checker.grammar(Constraint(form, text, "grammar"), "bench"), "accepted"
        except RequestError as exc:
            grammar, verdict = "", exc.message
        check_s = time.perf_counter() - begun
        worst_s = _worst_step_s(engine, grammar) if grammar else 0.0
        attacks.append({"": kind, "check s": check_s, "verdict": verdict[:90], "worst step s": worst_s})
    await checker.close()
    return attacks


async def run_suite(engine: Engine, tokenizer: Tokenizer, settings: argparse.Namespace) -> dict[str, int]:
    """How many schemas of the suite have which outcome."""
    checker, outcomes = GrammarChecker(tokenizer.to_json), Counter[str]()
    for schema in _schemas(settings.suite)[: 10 if settings.quick else None]:
        outcome = await _outcome(engine, tokenizer, checker, schema)
        outcomes[outcome] += 1
        if outcome.startswith("INVALID"):
            console.print(f"{outcome}: {json.dumps(schema)}", markup=False)
    await checker.close()
    return dict(outcomes.most_common())


async def _outcome(engine: Engine, tokenizer: Tokenizer, checker: GrammarChecker, schema: Any) -> str:
    try:
        grammar = await checker.grammar(Constraint("json", json.dumps(schema), "schema"), "bench")
    except RequestError:
        return "refused by name"
    sequences = [_add(engine, f"schema-{seed}", grammar, 200, seed) for seed in range(2)]
    run(engine, sequences)
    results = {_judge(tokenizer, schema, sequence) for sequence in sequences}
    return next((one for one in sorted(results) if one.startswith("INVALID")), min(results))


def _judge(tokenizer: Tokenizer, schema: Any, sequence: Sequence) -> str:
    if sequence.finish_reason is not FinishReason.STOP:
        return "valid so far: cut at 200 tokens" if sequence.finish_reason is FinishReason.LENGTH else "failed by name"
    text = tokenizer.decode(sequence.output_ids, skip_special_tokens=True)
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as exc:
        return f"INVALID {text[:60]!r} {str(exc)[:60]}"
    return "valid"


def _schemas(folder: Path) -> list[Any]:
    cases = [case for path in sorted(folder.glob("*.json")) for case in json.loads(path.read_text())]
    distinct = {json.dumps(case["schema"], sort_keys=True): case["schema"] for case in cases}
    return [schema for schema in distinct.values() if isinstance(schema, dict)]


def _ask(engine: Engine, kind: str, num_tokens: int, *, seed: int) -> Sequence:
    grammar = make_grammar(*_KINDS[kind]) if kind else ""
    return _add(engine, f"{kind} {seed}", grammar, num_tokens, seed)


def _add(engine: Engine, name: str, grammar: str, num_tokens: int, seed: int) -> Sequence:
    prompt = torch.randint(3, 1000, (64,), generator=torch.Generator().manual_seed(seed)).tolist()
    sampling = SamplingParams(
        max_tokens=num_tokens, temperature=0.7, seed=seed, ignore_eos=not grammar, grammar=grammar
    )
    sequence = engine.factory.make_sequence(name, prompt, sampling)
    engine.add(sequence)
    return sequence


def _worst_step_s(engine: Engine, grammar: str) -> float:
    _add(engine, "hostile", grammar, 100, 0)
    worst = 0.0
    while engine.has_work:
        begun = time.perf_counter()
        engine.step()
        worst = max(worst, time.perf_counter() - begun)
    return worst


if __name__ == "__main__":
    main()

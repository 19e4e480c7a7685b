"""Token equality: do prompts give the same tokens on one colocated worker and disaggregated over NIXL?

The cases hold lengths around block and chunk limits (1, block - 1, block, block + 1, ..., 2,000), conversations of two
turns (the second hits the cache of both workers, and more of it on the decode worker, which has the answer too), and
prompts whose beginning only the prefill worker has seen. Each set-up goes through all of them greedy and with seeded
sampling (temperature 0.8, top-p 0.95), one at a time and eight at once, each time with a cold cache, and once more with
a warm one. Every answer has to equal the one that the colocated server gave one at a time: the text, the number of
tokens, and in the passes one at a time each single token.

Stands behind README's "the same tokens on every path".

    python -m benchmarks.equality
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.common import (
    COLOCATED,
    ONE_PAIR,
    ONE_PAIR_ALWAYS,
    Server,
    arguments,
    console,
    print_rows,
    serving,
    write_result,
)
from tandem.loadtest.client import run_measured
from tandem.protocol.config import EngineConfig

_BLOCK = EngineConfig(model=".").block_size
_CHUNK = 512  # tokens of a prefill worker's step on a CPU
_EDGES = (1, 2, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK - 1, 2 * _BLOCK, 2 * _BLOCK + 1, 33, 64, 100, 128, 255, 256)
_CHUNKS = (_CHUNK - 1, _CHUNK, _CHUNK + 1, 700, 1000, 2 * _CHUNK, 2 * _CHUNK + 1, 1500, 2000)
_TURNS = (5, _BLOCK - 1, _BLOCK, 100, 250, _CHUNK + 1, 900, 1200)  # first prompts of conversations of two turns
_PRIMED = (_BLOCK, 3 * _BLOCK + 1, 128, 300, _CHUNK, _CHUNK + 1, 800, 1100)  # parts that only prefill has seen
_TAIL_TOKENS = 45  # what a second turn, or a primed prompt, goes on with

_GREEDY: dict[str, Any] = {"temperature": 0.0}
_SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt, or two that follow each other.

    [0, num_primed)     sent first, for a single token: only the prefill worker of a pair has it then
    [0, len(prompt))    the prompt
    + answer + tail     a second turn, where there is a tail
    """

    prompt: list[int]
    num_primed: int = 0
    tail: tuple[int, ...] = ()

    @property
    def num_answers(self) -> int:
        """Answers that are compared."""
        return 2 if self.tail else 1


class Answer(NamedTuple):
    """The answer to one prompt."""

    text: str
    num_output_tokens: int
    num_cached_tokens: int
    tokens: tuple[str, ...] | None  # if they were requested

    def equals(self, reference: Answer) -> bool:
        """Whether both answers agree in everything that both contain."""
        has_tokens = self.tokens is not None and reference.tokens is not None
        return self[:2] == reference[:2] and (not has_tokens or self.tokens == reference.tokens)


class Pass(NamedTuple):
    """One pass over all cases. Passes with the same salt share their cache, so the second is warm."""

    name: str
    sampling: dict[str, Any]
    concurrency: int
    salt: str


_REFERENCES = (
    Pass("greedy, 1 at a time", _GREEDY, 1, "greedy"),
    Pass("sampled, 1 at a time", _SAMPLED, 1, "sampled"),
)
_PASSES = (
    *_REFERENCES,
    Pass("greedy, 8 at once", _GREEDY, 8, "greedy at once"),
    Pass("greedy, 8 at once, warm", _GREEDY, 8, "greedy at once"),
    Pass("sampled, 8 at once", _SAMPLED, 8, "sampled at once"),
)

References = dict[float, list[Answer]]  # by temperature: answers of all cases in order


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--output-tokens", 24, quick=8)
    parser.option("--repeat", 3, "cases of each short length", quick=1)
    settings = parser.settings()
    results: dict[str, Any] = {}
    cases: list[Case] = []
    references: References = {}
    for setup in (COLOCATED, ONE_PAIR_ALWAYS, ONE_PAIR):
        with serving(setup, settings.model) as server:
            # All set-ups get the same prompts: second turns carry the colocated server's answers.
            cases = cases or run_measured(make_cases(server, settings))
            results[setup.name] = run_measured(measure(server, settings, cases, references))
    _show(results, cases)
    write_result("equality", settings, {"num_cases": len(cases), "setups": results})
    return int(any(row["num_equal"] < row["num_answers"] for result in results.values() for row in result["passes"]))


async def make_cases(server: Server, settings: argparse.Namespace) -> list[Case]:
    """All cases; the seed draws their words."""
    lengths = [*_EDGES * settings.repeat, *_CHUNKS, *_TURNS, *_PRIMED]
    prompts = await server.prompts(len(lengths), max(lengths), settings.seed)
    num_plain, rng = len(lengths) - len(_TURNS) - len(_PRIMED), random.Random(settings.seed)
    cases = []
    for idx, (words, length) in enumerate(zip(prompts, lengths, strict=True)):
        tail = tuple(rng.sample(words, _TAIL_TOKENS))
        if idx < num_plain:
            cases.append(Case(words[:length]))
        elif idx < num_plain + len(_TURNS):
            cases.append(Case(words[:length], tail=tail))
        else:
            cases.append(Case([*words[:length], *tail], num_primed=length))
    return cases


async def measure(
    server: Server, settings: argparse.Namespace, cases: Sequence[Case], references: References
) -> dict[str, Any]:
    """All passes over one server. The first server to come fills `references`."""
    rows = []
    for a_pass in _PASSES:
        temperature = a_pass.sampling["temperature"]
        answers = await _run_pass(server, settings, cases, a_pass, references.get(temperature))
        reference = references.setdefault(temperature, answers)
        different = [idx for idx, answer in enumerate(answers) if not answer.equals(reference[idx])]
        rows.append(
            {
                "pass": a_pass.name,
                "num_answers": len(answers),
                "num_equal": len(answers) - len(different),
                "num_with_hits": sum(answer.num_cached_tokens > 0 for answer in answers),
                "num_cached_tokens": sum(answer.num_cached_tokens for answer in answers),
                "differences": [[answers[idx].text, reference[idx].text] for idx in different],
            }
        )
        console.print(f"  {server.name}, {a_pass.name}: {len(answers) - len(different)} of {len(answers)} equal")
    return {
        "passes": rows,
        "num_handoffs": (await server.client.request_json("GET", "/v1/pools"))["num_handoffs"],
        "check": await server.client.request_json("POST", "/v1/pools/check"),
    }


async def _run_pass(
    server: Server,
    settings: argparse.Namespace,
    cases: Sequence[Case],
    a_pass: Pass,
    reference: Sequence[Answer] | None,
) -> list[Answer]:
    limit = asyncio.Semaphore(a_pass.concurrency)
    starts = [sum(case.num_answers for case in cases[:idx]) for idx in range(len(cases))]

    async def run(case: Case, seed: int, start: int) -> list[Answer]:
        body = {
            "model": server.model,
            "max_tokens": settings.output_tokens,
            "ignore_eos": True,
            "seed": seed,
            "cache_salt": a_pass.salt,
            **a_pass.sampling,
            **({"logprobs": 0} if a_pass.concurrency == 1 else {}),
        }
        async with limit:
            if case.num_primed:
                await _ask(server, body | {"prompt": case.prompt[: case.num_primed], "max_tokens": 1})
            answers = [await _ask(server, body | {"prompt": case.prompt})]
            if case.tail:
                said = answers[0] if reference is None else reference[start]
                tokens = await server.client.request_json(
                    "POST", "/tokenize", {"prompt": said.text, "add_special_tokens": False}
                )
                prompt = [*case.prompt, *tokens["tokens"], *case.tail]
                answers.append(await _ask(server, body | {"prompt": prompt}))
            return answers

    runs = (run(case, idx, start) for idx, (case, start) in enumerate(zip(cases, starts, strict=True)))
    return [answer for answers in await asyncio.gather(*runs) for answer in answers]


async def _ask(server: Server, body: dict[str, Any]) -> Answer:
    reply = await server.client.request_json("POST", "/v1/completions", body)
    (choice,), usage = reply["choices"], reply["usage"]
    return Answer(
        choice["text"],
        usage["completion_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        tuple(choice["logprobs"]["tokens"]) if choice.get("logprobs") else None,
    )


def _show(results: dict[str, Any], cases: Sequence[Case]) -> None:
    rows = [
        {
            "set-up": name,
            "pass": row["pass"],
            "equal": f"{row['num_equal']} / {row['num_answers']}",
            "with hits": row["num_with_hits"],
            "cached tokens": row["num_cached_tokens"],
        }
        for name, result in results.items()
        for row in result["passes"]
    ]
    num_answers = sum(case.num_answers for case in cases)
    print_rows(f"{len(cases)} cases with {num_answers} answers, compared with colocated, 1 at a time", rows)
    for name, result in results.items():
        idle = "idle, books in order" if result["check"]["idle"] else f"NOT idle: {result['check']['workers']}"
        console.print(f"{name}: {result['num_handoffs']} handoffs; at the end {idle}")


if __name__ == "__main__":
    sys.exit(main())

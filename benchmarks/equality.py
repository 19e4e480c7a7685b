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
    Setup,
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

_PACKED = Setup("1P1D, always a pair, packed KV", (*ONE_PAIR_ALWAYS.flags, "--wire-codec=exact"))
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

References = dict[float, list[list[Answer]]]  # by temperature: the answers of each case


def main() -> int:
    parser = arguments(__doc__)
    parser.option("--output-tokens", 24, quick=8)
    parser.option("--repeat", 3, "cases of each short length", quick=1)
    settings = parser.settings()
    rows: list[dict[str, Any]] = []
    cases: list[Case] = []
    references: References = {}
    for setup in (COLOCATED, ONE_PAIR_ALWAYS, _PACKED, ONE_PAIR):
        with serving(setup, settings.model) as server:
            # All set-ups get the same prompts: second turns carry the colocated server's answers.
            cases = cases or run_measured(make_cases(server, settings))
            rows += run_measured(measure(server, settings, cases, references))
    print_rows(f"{len(cases)} cases, compared with colocated, 1 at a time", rows)
    write_result("equality", settings, rows)
    return int(any(row["equal"] < row["answers"] for row in rows))


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
) -> list[dict[str, Any]]:
    """All passes over one server. The first server to come fills `references`."""
    rows = []
    for a_pass in _PASSES:
        temperature = a_pass.sampling["temperature"]
        by_case = await _run_pass(server, settings, cases, a_pass, references.get(temperature))
        expected = references.setdefault(temperature, by_case)
        pairs = [pair for both in zip(by_case, expected, strict=True) for pair in zip(*both, strict=True)]
        different = [pair for pair in pairs if not pair[0].equals(pair[1])]
        cached = [answer.num_cached_tokens for answer, _ in pairs]
        row = {"set-up": server.name, "pass": a_pass.name, "answers": len(pairs), "equal": len(pairs) - len(different)}
        rows.append(row | {"with hits": sum(num > 0 for num in cached), "cached tokens": sum(cached)})
        console.print(f"  {server.name}, {a_pass.name}: {rows[-1]['equal']} of {len(pairs)} equal")
        for answer, reference in different:
            console.print(f"  {answer} is not {reference}", markup=False, soft_wrap=True)
    num_handoffs = (await server.client.request_json("GET", "/v1/pools"))["num_handoffs"]
    check = await server.client.request_json("POST", "/v1/pools/check")
    idle = "idle, books in order" if check["idle"] else f"NOT idle: {check['workers']}"
    console.print(f"{server.name}: {num_handoffs} handoffs; at the end {idle}")
    return rows


async def _run_pass(
    server: Server,
    settings: argparse.Namespace,
    cases: Sequence[Case],
    a_pass: Pass,
    references: list[list[Answer]] | None,
) -> list[list[Answer]]:
    limit = asyncio.Semaphore(a_pass.concurrency)

    async def run(number: int, case: Case) -> list[Answer]:
        body = {
            "model": server.model,
            "max_tokens": settings.output_tokens,
            "ignore_eos": True,
            "seed": number,
            "cache_salt": a_pass.salt,
            **a_pass.sampling,
            **({"logprobs": 0} if a_pass.concurrency == 1 else {}),
        }
        async with limit:
            if case.num_primed:
                await _ask(server, body | {"prompt": case.prompt[: case.num_primed], "max_tokens": 1})
            answers = [await _ask(server, body | {"prompt": case.prompt})]
            if case.tail:
                said = answers[0] if references is None else references[number][0]
                tokens = await server.client.request_json(
                    "POST", "/tokenize", {"prompt": said.text, "add_special_tokens": False}
                )
                prompt = [*case.prompt, *tokens["tokens"], *case.tail]
                answers.append(await _ask(server, body | {"prompt": prompt}))
            return answers

    return await asyncio.gather(*(run(number, case) for number, case in enumerate(cases)))


async def _ask(server: Server, body: dict[str, Any]) -> Answer:
    reply = await server.client.request_json("POST", "/v1/completions", body)
    (choice,), usage = reply["choices"], reply["usage"]
    return Answer(
        choice["text"],
        usage["completion_tokens"],
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        tuple(choice["logprobs"]["tokens"]) if choice.get("logprobs") else None,
    )


if __name__ == "__main__":
    sys.exit(main())

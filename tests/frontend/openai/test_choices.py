from __future__ import annotations

import asyncio
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from tandem.frontend.http.metrics import FrontendMetrics, RequestClock
from tandem.frontend.openai.choice_text import ChoiceDelta, ChoicePlan
from tandem.frontend.openai.choices import MAX_QUEUED_DELTAS, run_choices
from tandem.protocol.digest import EVERYONE
from tandem.protocol.errors import WorkerError
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import GenerateRequest
from tandem.router.streams import Stream
from tandem.text.tokenizer import Tokenizer
from tests.support.fake_backend import FakeBackend, Step

NUM_CHOICES = 3
REPLY = "hello world " * 60


def run(backend: FakeBackend, max_tokens: int = 10_000) -> Stream[ChoiceDelta]:
    sampling = SamplingParams(max_tokens=max_tokens)
    plans = [
        ChoicePlan(i, GenerateRequest(f"r{i}", [1], sampling, EVERYONE), is_first_sibling=i == 0)
        for i in range(NUM_CHOICES)
    ]
    metrics = FrontendMetrics(CollectorRegistry())
    return run_choices(backend, plans, backend.tokenizer, lambda: RequestClock(metrics, 0.0))


async def until_nothing_moves(backend: FakeBackend) -> None:
    num_steps, num_still = backend.num_steps, 0
    while num_still < 50:
        await asyncio.sleep(0)
        num_still = num_still + 1 if backend.num_steps == num_steps else 0
        num_steps = backend.num_steps


async def test_a_reader_that_stops_holds_all_choices_back_and_loses_nothing(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, REPLY)
    deltas = run(backend)
    texts = [""] * NUM_CHOICES
    num_stops = 0

    def read_some(batch: list[ChoiceDelta]) -> bool:
        for delta in batch:
            texts[delta.index] += delta.text
        return False

    while not await deltas.read_into(read_some):
        if num_stops < 3:
            await until_nothing_moves(backend)
            num_taken = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
            assert backend.num_steps <= num_taken + MAX_QUEUED_DELTAS + 4 * NUM_CHOICES
        num_stops += 1
    assert num_stops > 3
    assert texts == [REPLY] * NUM_CHOICES
    await deltas.aclose()
    assert backend.num_open == 0


async def test_the_error_of_one_choice_follows_what_came_before_it_and_ends_all(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer, REPLY)
    ends: dict[str, tuple[int, Step]] = {
        "r0": (2, asyncio.Event()),
        "r1": (5, WorkerError("gone")),
        "r2": (0, asyncio.Event()),
    }

    def script(request: GenerateRequest) -> list[Step]:
        num_steps, end = ends[request.request_id]
        return [*backend.reply_steps(request)[:num_steps], end]

    backend.script = script
    deltas = run(backend)
    seen: list[int] = []
    with pytest.raises(WorkerError, match="gone"):
        await deltas.read_into(lambda batch: seen.extend(delta.index for delta in batch) or True)  # type: ignore[func-returns-value]
    assert (seen.count(0), seen.count(1)) == (2, 5)
    await deltas.aclose()
    assert backend.num_open == 0


async def test_without_tokens_to_generate_the_backend_is_not_asked(tokenizer: Tokenizer) -> None:
    backend = FakeBackend(tokenizer)
    deltas = run(backend, max_tokens=0)
    reasons: list[str | None] = []
    while batch := await deltas.take():
        reasons += [delta.finish_reason for delta in batch]
    assert (reasons, backend.requests) == (["length"] * NUM_CHOICES, [])


@pytest.mark.parametrize("fails", [False, True])
async def test_a_prompt_counts_with_its_first_token_and_hits_or_never(tokenizer: Tokenizer, *, fails: bool) -> None:
    backend, registry, begins = FakeBackend(tokenizer, REPLY), CollectorRegistry(), asyncio.Event()
    backend.script = lambda request: [begins, *([WorkerError("gone")] if fails else backend.reply_steps(request)[:1])]
    clock = partial(RequestClock, FrontendMetrics(registry), 0.0)
    plans = [
        ChoicePlan(
            number,
            GenerateRequest(f"r{number}", [1] * 9, SamplingParams(max_tokens=4), EVERYONE),
            is_first_sibling=not number,
        )
        for number in range(2)
    ]

    def counted() -> list[float | None]:
        return [registry.get_sample_value(f"tandem_router_{name}prompt_tokens_total") for name in ("", "cached_")]

    deltas = run_choices(backend, plans, tokenizer, clock)
    reading = asyncio.create_task(deltas.take())
    await until_nothing_moves(backend)
    assert counted() == [0, 0], "it is computed still"
    begins.set()
    await asyncio.gather(reading, return_exceptions=True)
    await until_nothing_moves(backend)
    assert counted() == ([0, 0] if fails else [9, 3])
    await deltas.aclose()

"""Closed-loop load: a fixed number of clients, each of which sends its next request when the last one is answered."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tandem.loadtest.client import MeasuringClient, StreamTiming
from tandem.loadtest.prompts import random_messages


class LoadRun(NamedTuple):
    """The streams of one run, in the order in which they ended, and the run's duration."""

    timings: list[StreamTiming]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatLoad:
    """Conversations: each session sends a turn, reads the answer, and sends the next with the whole history."""

    num_sessions: int
    num_turns: int = 4
    words_per_turn: int = 100
    output_tokens: int = 64
    seed: int = 0


async def run_completions(
    client: MeasuringClient,
    prompts: Sequence[str | list[int]],
    *,
    model: str,
    output_tokens: int,
    concurrency: int,
    on_done: Callable[[], None] | None = None,
) -> LoadRun:
    """Stream one completion of exactly `output_tokens` for each prompt, `concurrency` at a time."""

    async def send(prompt: str | list[int]) -> list[StreamTiming]:
        return [
            await client.stream_completion(
                prompt, model=model, max_tokens=output_tokens, ignore_eos=True, temperature=0.0
            )
        ]

    return await _run([partial(send, prompt) for prompt in prompts], concurrency, on_done)


async def run_chats(
    client: MeasuringClient,
    load: ChatLoad,
    *,
    model: str,
    concurrency: int,
    on_done: Callable[[], None] | None = None,
) -> LoadRun:
    """Hold all conversations, `concurrency` at a time."""

    async def converse(session: int) -> list[StreamTiming]:
        rng = random.Random(f"{load.seed}/{session}")
        history: list[dict[str, str]] = []
        timings = []
        for _ in range(load.num_turns):
            messages = random_messages(rng, history, load.words_per_turn)
            timing = await client.stream_chat(
                messages, model=model, max_tokens=load.output_tokens, ignore_eos=True, temperature=0.0
            )
            timings.append(timing)
            if timing.error:
                break  # without this answer the next turn would be another conversation
            history = [*messages, {"role": "assistant", "content": timing.text}]
        return timings

    return await _run([partial(converse, session) for session in range(load.num_sessions)], concurrency, on_done)


async def _run(
    jobs: Sequence[Callable[[], Awaitable[list[StreamTiming]]]],
    concurrency: int,
    on_done: Callable[[], None] | None,
) -> LoadRun:
    """Run the jobs in order, `concurrency` at a time. Cancelling it cancels all of them."""
    waiting = iter(jobs)
    timings: list[StreamTiming] = []

    async def client_loop() -> None:
        for job in waiting:
            timings.extend(await job())
            if on_done is not None:
                on_done()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(jobs))):
            group.create_task(client_loop())
    return LoadRun(timings, time.perf_counter() - started)

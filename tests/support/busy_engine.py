"""Requests for engines that one long prompt keeps busy, so that what comes next waits in the router."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from tandem.router.engines.config import EngineSpec
from tests.support.engines_harness import COMPLETIONS, Router, completion, spec_of
from tests.support.fake_openai import FakeServer
from tests.support.waiting import eventually


def small(fake: FakeServer, name: str, **fields: Any) -> EngineSpec:
    """An engine that computes 64 prompt tokens in a step, so that one long prompt keeps it busy for a while."""
    return spec_of(fake, name, max_num_batched_tokens=64, **fields)


def prompt_of(name: str) -> str:
    """About 2,000 tokens that begin with the name, so that prompts share no prefix."""
    return f"{name:16}" + "x" * 8000


def order(fake: FakeServer) -> list[str]:
    """Names of the requests, in the order in which the engine got them."""
    return [request["prompt"][:16].strip() for request in fake.requests]


def start(router: Router, prompt: str = "a b c d", **options: Any) -> asyncio.Task[httpx.Response]:
    """Options that begin with x- are headers."""
    headers = {key: options.pop(key) for key in list(options) if key.startswith("x-")}
    body = completion(prompt, **({"stream": True} | options))
    return asyncio.create_task(router.client.post(COMPLETIONS, json=body, headers=headers))


async def one_runs(router: Router, fake: FakeServer) -> asyncio.Task[httpx.Response]:
    """A prompt that is being computed; what comes now waits in the router."""
    fake.headers_pause.clear()
    running = start(router, prompt_of("running"))
    await eventually(lambda: len(fake.requests) == 1)
    return running

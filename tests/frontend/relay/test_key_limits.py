"""Limits of API keys in front of engines: tokens are those that the engine reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import LocalLimiter
from tandem.scheduling.admission.key_limits import KeyLimits
from tests.support.engines_harness import CHAT, COMPLETIONS, completion, routing, routing_by_decider, spec_of
from tests.support.fake_backend import events
from tests.support.fake_openai import FakeServer
from tests.support.keys import stored_key
from tests.support.waiting import eventually

KEY = {"authorization": "Bearer sk-a"}


def limited_keys(limiter: LocalLimiter | None = None, **limits: int) -> ApiKeys:
    return ApiKeys([stored_key("sk-a", "a", id="k-a", limits=KeyLimits(**limits))], is_required=True, limiter=limiter)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_is_charged_what_its_engine_reports(fake_a: FakeServer, path: str, is_stream: bool) -> None:
    limiter = LocalLimiter(lambda: 100.0)
    keys = limited_keys(limiter, requests_per_minute=100, tokens_per_minute=10_000)
    async with routing(spec_of(fake_a, "a"), api_keys=keys) as router:
        body: dict[str, Any] = completion(max_tokens=4, stream=is_stream)
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        answer = await router.client.post(path, json=body, headers=KEY)
        assert answer.status_code == 200, answer.text
        usage = [one for one in events(answer) if one != "[DONE]"][-1]["usage"] if is_stream else answer.json()["usage"]
        state = limiter.limiter._states["k-a"]
        await eventually(lambda: not state.running)
        assert usage["completion_tokens"] == 4
        assert state.tokens.level == 10_000 - usage["prompt_tokens"] - usage["completion_tokens"]


async def test_a_request_over_a_limit_reaches_no_engine(fake_a: FakeServer, tmp_path: Path) -> None:
    async with routing_by_decider(
        tmp_path, spec_of(fake_a, "a"), api_keys=limited_keys(tokens_per_minute=50)
    ) as decider:
        frontends = [await decider.frontend(name) for name in ("one", "two")]
        first = await frontends[0].client.post(COMPLETIONS, json=completion(max_tokens=48), headers=KEY)
        assert first.status_code == 200, first.text
        refused = await frontends[1].client.post(COMPLETIONS, json=completion(max_tokens=48), headers=KEY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "tokens_per_minute=50" in refused.json()["error"]["message"]
        huge = await frontends[1].client.post(COMPLETIONS, json=completion(max_tokens=2**31, n=2**40), headers=KEY)
        assert (huge.status_code, len(fake_a.requests)) == (429, 1)

"""Asks an engine that has stalled for one token, to learn whether it computes again without risking a client's request.

There is one question at a time, and it waits as long as a client's request may: an engine that hangs does not collect
questions, and one that computes again is found at once. The halves of an SGLang pair answer only one of the routes.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any

from tandem.router.engines.bounded_json import NotJson, loads
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.probe_client import ProbeClient, ProbeFailed

_CANNOT_ASK = frozenset({400, 404, 405, 422, 501})


class StepVerdict(enum.Enum):
    """What is known about an engine that has stalled."""

    UNKNOWN = enum.auto()  # not answered yet, or it failed
    COMPUTES = enum.auto()
    CANNOT_BE_ASKED = enum.auto()  # it answers none of the questions


class StepCheck:
    """Its owner calls `close` on every path."""

    def __init__(self, client: ProbeClient, timeout_s: float) -> None:
        """`timeout_s`: a question that is not answered within this time is asked again."""
        self._client = client
        self._timeout_s = timeout_s
        self._asking: asyncio.Task[StepVerdict] | None = None

    def verdict(self, spec: EngineSpec) -> StepVerdict:
        """What the question has shown. Asks it if none is under way."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(spec), name=f"question to engine {spec.name}")
        if not self._asking.done():
            return StepVerdict.UNKNOWN
        asked, self._asking = self._asking, None
        return asked.result()

    async def close(self) -> None:
        """Drop the question."""
        asked, self._asking = self._asking, None
        if asked is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

    async def _ask(self, spec: EngineSpec) -> StepVerdict:
        for method, path, body in _questions(spec):
            try:
                answer = await self._client.send(method, path, body, self._timeout_s)
            except ProbeFailed:
                return StepVerdict.UNKNOWN
            if answer.status not in _CANNOT_ASK:
                computes = answer.status == 200 and (body is None or _has_choices(answer.content))
                return StepVerdict.COMPUTES if computes else StepVerdict.UNKNOWN
        return StepVerdict.CANNOT_BE_ASKED


def _questions(spec: EngineSpec) -> list[tuple[str, str, dict[str, Any] | None]]:
    found: list[tuple[str, str, dict[str, Any] | None]] = []
    if spec.kind == "sglang":
        found.append(("GET", "/health_generate", None))
    if spec.serves_alone:
        short = {"model": spec.model, "max_tokens": 1, "stream": False}
        found.append(("POST", "/v1/completions", short | {"prompt": "a"}))
        found.append(("POST", "/v1/chat/completions", short | {"messages": [{"role": "user", "content": "a"}]}))
    return found


def _has_choices(content: bytes) -> bool:
    try:
        answer = loads(content)
    except NotJson:
        return False
    return isinstance(answer, dict) and bool(answer.get("choices"))

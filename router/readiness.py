"""Readiness: a real generation succeeded. An open port is not enough."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self

from tandem.protocol.digest import EVERYONE
from tandem.protocol.errors import ServingError
from tandem.protocol.sampling import SamplingParams
from tandem.router.backend import Backend, GenerateRequest
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 60.0  # the first generation may have to warm the workers up
POLL_INTERVAL_S = 0.2
MAX_RETRY_DELAY_S = 5.0


class ReadinessCheck(Protocol):
    """Whether requests should be sent here now."""

    @property
    def reason(self) -> str | None:
        """The reason if they should not, else None."""


class ReadinessProbe:
    """Generates one token as a probe until that succeeds, and again after the backend lost its workers.

    It probes while it is entered as a context manager.
    """

    def __init__(self, backend: Backend, token_id: int) -> None:
        self._backend = backend
        self._token_id = token_id
        self._is_proven = False
        self._reason = ""
        self._has_served = False
        self._down_since_s = time.monotonic()
        self._background = BackgroundTasks()

    async def __aenter__(self) -> Self:
        self._background.keep("readiness probe", self._run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._background.close()

    @property
    def reason(self) -> str | None:
        """Why requests should not be sent here now; None if they should."""
        if not self._backend.ready:
            return self._no_workers()
        return None if self._is_proven else self._reason or self._no_workers()

    def _no_workers(self) -> str:
        down_s = f"{time.monotonic() - self._down_since_s:.0f} s"
        if self._has_served:
            return f"No workers are ready: the last one was lost {down_s} ago."
        return f"No workers are ready yet: the first ones have been loading for {down_s}."

    async def _run(self) -> None:
        retries, num_failures = Backoff(2 * POLL_INTERVAL_S, MAX_RETRY_DELAY_S), 0  # in a row
        for attempt in itertools.count():
            if not self._backend.ready:
                self._is_proven = False
                num_failures = 0
            elif not self._is_proven:
                self._is_proven = await self._probe(f"ready-{attempt}")
                self._has_served |= self._is_proven
                num_failures = 0 if self._is_proven else num_failures + 1
            if self._is_proven:
                self._down_since_s = time.monotonic()
            await asyncio.sleep(retries.pause_s(num_failures) or POLL_INTERVAL_S)

    async def _probe(self, request_id: str) -> bool:
        self._reason = "The first generation has not finished yet."
        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id, [self._token_id], sampling, EVERYONE)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                num_tokens = await self._generate(request)
        except TimeoutError:
            self._reason = f"A one-token generation took longer than {PROBE_TIMEOUT_S:.0f} s."
        except ServingError as exc:
            self._reason = f"A one-token generation failed: {exc}"
        except Exception:  # a bug of ours: the loop must go on probing
            logger.exception("The readiness probe failed")
            self._reason = "A one-token generation failed."
        else:
            if num_tokens:
                logger.info("Ready: a one-token generation succeeded")
                return True
            self._reason = "A one-token generation returned no token."
        logger.warning("Not ready: %s", self._reason)
        return False

    async def _generate(self, request: GenerateRequest) -> int:
        num_tokens = 0
        async with aclosing(self._backend.serve(request)) as deltas:
            while batch := await deltas.take():
                num_tokens += sum(len(delta.token_ids) for delta in batch)
        return num_tokens

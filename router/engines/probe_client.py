"""HTTP for probes of one engine: small requests, each with a deadline and a bound on its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from tandem.router.engines.addresses import Resolve
from tandem.router.engines.upstream import AnswerTooLarge, Unreachable, Upstream
from tandem.runtime.followed_tls import FollowedTls
from tandem.runtime.idle_timeout import answered_in_time
from tandem.runtime.time_slicer import TimeSlicer

MAX_ANSWER_BYTES = 8 * 1024 * 1024  # answer to a health check, `/metrics` or the list of models
_CONNECT_TIMEOUT_S = 3600.0  # the deadline of the probe is shorter
_REQUEST_ID = "probe"


class ProbeFailed(Exception):
    """There is no answer, or none that is whole. `is_absent`: nothing listens there."""

    def __init__(self, reason: str, *, is_absent: bool = False) -> None:
        super().__init__(reason)
        self.is_absent = is_absent


class ProbeAnswer(NamedTuple):
    """A whole answer."""

    status: int
    content: bytes


class ProbeClient:
    """Asks one engine. Used from one event loop only."""

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        resolve: Resolve | None,
        tls: FollowedTls | None = None,
        slicer: TimeSlicer | None = None,
    ) -> None:
        """The parameters are those of `Upstream`."""
        self._upstream = Upstream(
            url, headers, connect_timeout_s=_CONNECT_TIMEOUT_S, slicer=slicer, resolve=resolve, tls=tls
        )

    async def get(self, path: str, timeout_s: float) -> ProbeAnswer:
        """The engine's whole answer. Raises `ProbeFailed` if it is late, too large or missing."""
        return await self.send("GET", path, None, timeout_s)

    async def send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> ProbeAnswer:
        """As `get`, by any method, with a body as JSON."""
        content = b"" if body is None else msgspec.json.encode(body)
        # NOTE: not `asyncio.timeout`, which would expire at once after a pause of this process itself.
        request = asyncio.create_task(self._answer(method, path, content))
        try:
            if not await answered_in_time(request, timeout_s):
                raise ProbeFailed(f"no whole answer within {timeout_s:g} s")
            return request.result()
        except Unreachable as exc:
            raise ProbeFailed(f"no connection: {exc}", is_absent=True) from exc
        except AnswerTooLarge as exc:
            raise ProbeFailed(f"its answer to {path} is larger than {MAX_ANSWER_BYTES} bytes") from exc
        except OSError as exc:
            raise ProbeFailed(str(exc) or type(exc).__name__) from exc
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    async def _answer(self, method: str, path: str, content: bytes) -> ProbeAnswer:
        reply = await self._upstream.send(method, path, content, _REQUEST_ID)
        try:
            return ProbeAnswer(reply.status, await reply.read_all(MAX_ANSWER_BYTES))
        finally:
            reply.close()

    def close(self) -> None:
        """Close its connections."""
        self._upstream.close()

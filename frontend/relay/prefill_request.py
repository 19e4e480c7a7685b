"""The half of a request that goes to an SGLang prefill engine, while the other half goes to the decode engine.

SGLang's two engines find each other: both get the same request, with the address of the prefill engine's bootstrap
server and a room number that is theirs alone. The first token comes from the prefill engine with the KV, so both must
sample alike, and the client's answer is the decode engine's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tandem.frontend.relay.answers import parse_answer
from tandem.frontend.relay.connections import EngineConnection, in_time
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.errors import EngineTimeout
from tandem.router.engines.upstream import Reply

_ROOM_BITS = 63  # SGLang keeps the number in 64 bits, on some devices with a sign


class PrefillAnswer(NamedTuple):
    """What a prefill engine returned: 200, or the client's own error."""

    status: int
    answer: dict[str, Any]
    content: bytes


class PrefillRequest:
    """Runs from its construction on. Its owner calls `close` on every path."""

    def __init__(
        self,
        engine: EngineConnection,
        path: str,
        body: dict[str, Any],
        request_id: str,
        trace: Mapping[str, str],
        *,
        timeout_s: float,
    ) -> None:
        """`body` is the decode engine's, `trace` as in `Upstream.send`. `timeout_s` is the longest silence."""
        self.engine = engine
        plain = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
        content = msgspec.json.encode(plain)
        self._reply: Reply | None = None
        self.task = asyncio.ensure_future(self._run(path, content, request_id, trace, timeout_s))
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # marks it as seen

    def close(self) -> None:
        """End it: the engine stops computing. Later calls change nothing."""
        self.task.cancel()
        if self._reply is not None:
            self._reply.close()

    async def _run(
        self, path: str, content: bytes, request_id: str, trace: Mapping[str, str], timeout_s: float
    ) -> PrefillAnswer:
        """Raises `EngineFailed` or `EngineBusy`."""
        name = self.engine.name
        late = EngineTimeout(name, f"did not end the prompt within request_timeout_s={timeout_s:g}")
        async with in_time(timeout_s, late):
            reply = self._reply = await self.engine.upstream.post(path, content, request_id, trace)
            content = await reply.read_all()
        reply.close()
        answer = parse_answer(name, reply.status, reply.headers, content, bool)
        return PrefillAnswer(reply.status, answer, content)


def meeting_of(prefill: EngineSpec) -> dict[str, Any]:
    """The fields by which the two halves of one attempt find each other."""
    return {
        "bootstrap_host": urlsplit(prefill.url).hostname,
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": secrets.randbits(_ROOM_BITS),
    }


def decode_request_body(body: dict[str, Any], prefill: EngineSpec) -> dict[str, Any]:
    """The decode engine's half: it must know which data-parallel rank computes the prompt."""
    rank = prefill.data_parallel_rank
    return body if rank is None else body | {"disagg_prefill_dp_rank": rank}

"""One attempt to have a request answered by the engine, or the pair of engines, it was placed on.

    one engine   body -> engine
    a pair       body, max_tokens=1, "keep the KV" -> prefill engine;  body + where the KV is -> decode engine
                 (vLLM's NIXL flow: the decode engine reads the blocks; the first token comes from it)

An attempt books its load, sends the request, waits for the first byte, and gives everything back at its end. Until the
first byte a failure is an exception, so that the request can go elsewhere; after it the stream breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import orjson

from tandem.router.engines.answers import as_dict, error_text, parse_answer
from tandem.router.engines.client_request import ClientRequest, decode_body, prefill_body
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.errors import EngineBusy, EngineFailed, engine_errors
from tandem.router.engines.fleet import EngineFleet, Placed
from tandem.router.engines.observer import AttemptObserver
from tandem.router.engines.relay import StreamRelay
from tandem.router.engines.upstream import Reply
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.response_writer import ResponseWriter

__all__ = ["Attempt"]

T = TypeVar("T")


class Attempt:
    """Booked from its construction until `close`, which its owner calls on every path."""

    def __init__(
        self,
        fleet: EngineFleet,
        placed: Placed,
        request: ClientRequest,
        metrics: EdgeMetrics,
        on_end: Callable[[int], None],
    ) -> None:
        """Book the load. `on_end` is called with the length of a complete answer, in tokens.

        NOTE: no `await` between the placement and this, so that the next decision sees the booking.
        """
        self.status = 200
        self.content: bytes | None = None  # a plain answer, or the client's own error; None for a stream
        self.content_type = "application/json"
        self.has_answer = False  # the first byte has come
        self._timeout_s = fleet.config.request_timeout_s
        self._fleet = fleet
        self._placed = placed
        self._request = request
        self._reply: Reply | None = None
        self._relay: StreamRelay | None = None  # of a stream
        self._prefill_usage: dict[str, Any] | None = None  # of a pair
        self._waits_for = placed.decode
        self._timeout: asyncio.Timeout | None = None  # of the wait in progress
        self._aborted: EngineFailed | None = None
        for engine in placed.engines:
            engine.begin(self)
        self._booking = fleet.book(placed)
        self._observer = AttemptObserver(fleet, placed, self._booking, request, metrics, on_end)
        self._predicted_first_token: asyncio.TimerHandle | None = None
        if not request.is_stream and not placed.is_pair:
            # Nothing shows when the first token of a plain answer is there: the prediction has to do.
            ttft_s = placed.placement.best.terms.ttft_s
            loop = asyncio.get_running_loop()
            self._predicted_first_token = loop.call_later(ttft_s, self._booking.prefill_done)

    @property
    def engine(self) -> RemoteEngine:
        """The engine that the answer comes from."""
        return self._placed.decode

    @property
    def num_expected_cached_tokens(self) -> int:
        """Prompt tokens that the prefix index expected to be cached where the prompt is computed."""
        return self._placed.placement.best.num_cached_tokens

    async def open(self, on_first_token: Callable[[], None]) -> None:
        """Send the request and wait for the whole plain answer, or the first event of a stream.

        `on_first_token` is called when the first token of a stream comes.
        Raises `EngineFailed` or `EngineBusy`: then the request may go elsewhere.
        """
        self._observer.on_first_token = on_first_token
        try:
            await self._open()
        except EngineFailed as exc:
            engine = self._fleet.get(exc.engine)
            if engine is not None:
                self._observer.failed(engine, is_absent=exc.is_absent)
            raise
        self.has_answer = True
        self._observer.answered()

    async def relay(self, writer: ResponseWriter) -> bytes:
        """Forward a stream's events as they come; returns the last ones, which are not sent yet.

        Raises `EngineFailed`, and what `writer` raises.
        """
        assert self._relay is not None, "it is a stream"
        try:
            return await self._relay.run(writer, self._timeout_s, self.abort)
        except EngineFailed:
            self._observer.failed(self.engine)
            raise

    def abort(self, reason: str) -> None:
        """End it now, with an error that names the engine."""
        self._aborted = EngineFailed(self._waits_for.name, reason)
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        elif self._reply is not None:
            self._reply.fail(self._aborted)

    def prefill_done(self) -> None:
        """The first token came."""
        self._booking.prefill_done()

    def close(self) -> None:
        """End what still runs and give the booking back. Later calls change nothing."""
        self.release()
        if self._reply is not None:
            self._reply.close(is_ending=self._relay is not None and self._relay.is_done)

    def release(self) -> None:
        """Give the booking back; enough where nothing was sent."""
        self._booking.release(*self._observer.lengths)
        self._observer.close()
        if self._predicted_first_token is not None:
            self._predicted_first_token.cancel()
        for engine in self._placed.engines:
            engine.end(self)

    async def _open(self) -> None:
        body = self._request.body_for(self.engine)
        if self._placed.is_pair:
            answer = await self._prefill(body)
            if self.status != 200:
                return  # the client's own error
            body = decode_body(body, answer, self._placed.prefill.name)
        engine = self._waits_for = self.engine
        reply = await self._wait(self._send(engine, body))
        if reply.status == 200 and reply.headers.get("content-type", "").startswith("text/event-stream"):
            await self._read_first_event(engine, reply)
        else:
            await self._read_final_answer(engine, reply)

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the prompt computed; returns the prefill engine's answer, or sets `status` to the client's error."""
        engine = self._waits_for = self._placed.prefill
        answer, content = await self._read_answer(engine, await self._wait(self._send(engine, prefill_body(body))))
        if self.status != 200:
            self.content = content
            return answer
        self._prefill_usage = as_dict(answer.get("usage"))
        self._observer.prefilled(engine)
        return answer

    async def _send(self, engine: RemoteEngine, body: dict[str, Any]) -> Reply:
        if self._reply is not None:
            self._reply.close()
            self._reply = None
        try:
            content = orjson.dumps(body)
        except orjson.JSONEncodeError as exc:  # the client's body can be sent, so it is what the other engine returned
            raise EngineFailed(self._placed.prefill.name, "returned kv_transfer_params that cannot be sent on") from exc
        with engine_errors(engine.name):
            self._reply = await engine.upstream.post(self._request.path, content, self._request.request_id)
        return self._reply

    async def _read_answer(self, engine: RemoteEngine, reply: Reply) -> tuple[dict[str, Any], bytes]:
        """A whole answer, decoded and raw; sets `status`."""
        with engine_errors(engine.name):
            content = await self._wait(reply.read_all())
        try:
            answer = parse_answer(engine.name, reply.status, reply.headers, content)
        except EngineBusy as exc:
            engine.hold_back(exc.retry_after_s, self._fleet.clock())
            raise
        self.status = reply.status
        return answer, content

    async def _read_final_answer(self, engine: RemoteEngine, reply: Reply) -> None:
        answer, self.content = await self._read_answer(engine, reply)
        if self.status != 200:
            return
        usage = as_dict(answer.get("usage"))
        if self._prefill_usage is not None:
            usage = _pair_usage(self._prefill_usage, usage)
            if isinstance(answer.get("usage"), dict):
                try:
                    self.content = orjson.dumps(answer | {"usage": usage})
                except orjson.JSONEncodeError as exc:
                    raise EngineFailed(engine.name, f"answered with something that cannot be sent on: {exc}") from exc
        self._observer.saw_usage(usage, is_total=True)
        self._observer.ended()

    async def _read_first_event(self, engine: RemoteEngine, reply: Reply) -> None:
        prefill_usage = self._prefill_usage
        self._relay = relay = StreamRelay(
            engine.name,
            reply,
            self._observer,
            shows_usage=self._request.wants_usage,
            correct_usage=None if prefill_usage is None else partial(_pair_usage, prefill_usage),
        )
        while (first := relay.first_event) is None:
            await self._wait(relay.read_more())
        error = first.error
        if error is None:
            return
        code = error.get("code")
        if not isinstance(code, int) or not 400 <= code < 500:
            raise EngineFailed(engine.name, f"failed: {error_text(error)}")
        self.status, self.content = code, orjson.dumps({"error": error})

    async def _wait(self, work: Awaitable[T]) -> T:
        """Result of `work`, unless the engine stays silent for too long or `abort` is called meanwhile."""
        if self._aborted is not None:
            raise self._aborted
        timeout_s = self._timeout_s
        try:
            async with asyncio.timeout(timeout_s) as self._timeout:
                return await work
        except TimeoutError as exc:
            silent = EngineFailed(self._waits_for.name, f"sent nothing within request_timeout_s={timeout_s:g}")
            raise self._aborted or silent from exc
        finally:
            self._timeout = None


def _pair_usage(prefill_usage: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    """Usage of a pair: cached tokens are those the prefill engine did not compute, not those it handed over."""
    return usage | {"prompt_tokens_details": prefill_usage.get("prompt_tokens_details")}

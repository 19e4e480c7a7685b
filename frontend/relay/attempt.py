"""One attempt to have a request answered by the engine, or the pair of engines, it was placed on.

    one engine   body -> engine
    a pair       body, one token, "keep the KV" -> prefill engine;  body + where the KV is -> decode engine
                 (vLLM's NIXL flow: the decode engine reads the blocks; the first token comes from it)
    SGLang's pair  body + where they meet -> both engines at once; the answer is the decode engine's

An attempt sends the request, waits for the first byte, and tells the reservation what happens. Until the first byte a
failure is an exception, so that the request can go elsewhere; after it the stream breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.relay.answers import error_text, parse_answer
from tandem.frontend.relay.attempt_trace import AttemptTrace, Loss
from tandem.frontend.relay.client_request import ClientRequest
from tandem.frontend.relay.connections import EngineConnection, EngineConnections, engine_errors
from tandem.frontend.relay.observer import AttemptObserver
from tandem.frontend.relay.prefill_request import PrefillRequest, decode_request_body, meeting_of
from tandem.frontend.relay.stream_ledger import StreamLedger
from tandem.frontend.relay.stream_relay import Rewrite, StreamRelay
from tandem.router.engines.bounded_json import NotJson, Outline, dumps
from tandem.router.engines.dispatcher import EngineReservation, EngineTarget
from tandem.router.engines.errors import AdapterGone, EngineBusy, EngineFailed, EngineTimeout
from tandem.router.engines.upstream import Reply

T = TypeVar("T")


class EngineAttempt:
    """One attempt. Its owner calls `close` on every path."""

    def __init__(
        self,
        reservation: EngineReservation,
        target: EngineTarget,
        connections: EngineConnections,
        request: ClientRequest,
        metrics: FrontendMetrics,
        *,
        timeout_s: float,
        now: Callable[[], float],
        number: int = 0,
        ledger: StreamLedger | None = None,
        rewrite: Rewrite | None = None,
        former: AttemptObserver | None = None,
        loss: Loss | None = None,
    ) -> None:
        """`timeout_s` is the longest silence of an engine. `now` is the clock of the reservation.

        `number` counts the attempts of the request. With a `ledger` its stream may go on elsewhere: the engine is asked
        for token ids, and `rewrite` turns its events into those of the stream. `former` and `loss` are those of the
        attempts before, if tokens of it were shown already.
        """
        self.status = 200
        self.content: bytes | None = None  # a plain answer, or the client's own error; None for a stream
        self.content_type = "application/json"
        self.target = target
        self.ledger = ledger
        self._rewrite = rewrite
        self._timeout_s = timeout_s
        self._now = now
        self._reservation = reservation
        self._engine = connections[target.decode]
        self._prefill_engine = connections[target.prefill]
        self._request = request
        self._api = request.api
        self._reply: Reply | None = None
        self._relay: StreamRelay | None = None  # of a stream
        self._prefill_usage: dict[str, Any] | None = None  # of a pair
        self._prefill_request: PrefillRequest | None = None  # of SGLang's pair
        self._waits_for = self._engine
        self._timeout: asyncio.Timeout | None = None  # for the current wait
        self._aborted: EngineFailed | None = None
        span = request.span
        self._trace = None if span is None else AttemptTrace(span, request, target, number, loss)
        trace_headers = request.trace_headers if self._trace is None else self._trace.headers
        self._headers = {**trace_headers, **request.conversation_headers}
        self.observer = AttemptObserver(reservation, request, metrics, now, self._trace, former)

    async def open(self) -> None:
        """Send the request and wait for the whole plain answer, or for the first event of a stream.

        Raises `EngineFailed` or `EngineBusy`: then the request may go elsewhere.
        """
        try:
            await self._open()
        except AdapterGone as exc:
            self._reservation.refused(exc.engine, 0.0)
            self._trace_error(exc)
            raise
        except EngineFailed as exc:
            self._reservation.failed(exc.engine, is_absent=exc.is_absent, is_lost=exc.is_lost)
            self._trace_error(exc)
            raise
        except EngineBusy as exc:
            self._reservation.refused(exc.engine, exc.retry_after_s)
            self._trace_error(exc)
            raise
        self._reservation.answered()

    async def relay(self, writer: ResponseWriter) -> bytes:
        """Forward a stream's events as they come; returns the last ones, which are not sent yet.

        Raises `EngineFailed`, and what `writer` raises.
        """
        assert self._relay is not None, "it is a stream"
        try:
            return await self._relay.run(writer, self._timeout_s, self._fell_silent)
        except EngineFailed as exc:
            self._reservation.failed(exc.engine, is_lost=exc.is_lost)
            self._trace_error(exc)
            raise

    def end_with(self, events: bytes) -> bytes:
        """End a stream whose answer is complete with these events; returns those that are sent."""
        assert self._relay is not None, "it is a stream"
        return self._relay.end_with(events)

    def abort(self, engine: str, reason: str) -> None:
        """End it now, with an error that names the engine. Later calls change nothing."""
        self._abort(EngineFailed(engine, reason))

    def _fell_silent(self, reason: str) -> None:
        self._abort(EngineTimeout(self._engine.name, reason))

    def _abort(self, error: EngineFailed) -> None:
        if self._aborted is not None:
            return
        self._aborted = error
        if self._timeout is not None:
            if self._timeout.expired():
                return  # it is ending already
            self._timeout.reschedule(asyncio.get_running_loop().time())
        elif self._reply is not None:
            self._reply.fail(self._aborted)

    def close(self) -> None:
        """End what still runs. Later calls change nothing."""
        self.observer.close()
        if self._prefill_request is not None:
            self._prefill_request.close()
        if self._reply is not None:
            self._reply.close(is_ending=self._relay is not None and self._relay.is_done)
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.end(0 if self._reply is None else self._reply.status)

    def _prefilled(self) -> None:
        self._reservation.prefilled(self._now())
        if self._trace is not None:
            self._trace.prefilled()

    def _trace_error(self, error: EngineFailed | EngineBusy) -> None:
        if self._trace is not None:
            self._trace.failed(error)

    async def _open(self) -> None:
        body = self._request.body_for(self._engine.spec)
        if self.ledger is not None:
            body = body | {"return_token_ids": True}
        if self.target.is_pair and not self._engine.spec.serves_alone:
            await self._open_both(body)
            return
        if self.target.is_pair:
            answer = await self._prefill(body)
            if self.status != 200:
                return  # the client's own error
            body = self._api.decode_body(body, answer, self.target.prefill)
        await self._open_answer(body)

    async def _open_both(self, body: dict[str, Any]) -> None:
        """Send the request to both engines of SGLang's pair; wait as `_open_answer`, or for the prefill to fail."""
        spec, request_id = self._prefill_engine.spec, self._request.routing.request_id
        body = body | meeting_of(spec)
        prefill_request = self._prefill_request = PrefillRequest(
            self._prefill_engine, self._api.path, body, request_id, self._headers, timeout_s=self._timeout_s
        )
        answering = asyncio.ensure_future(self._open_answer(decode_request_body(body, spec)))
        try:
            await asyncio.wait({prefill_request.task, answering}, return_when=asyncio.FIRST_COMPLETED)
            if prefill_request.task.done():
                prefill = prefill_request.task.result()
                self._check_adapter(prefill_request.engine, prefill.status, prefill.answer)
                if prefill.status != 200:
                    self.status, self.content = prefill.status, prefill.content
                    return
                self._prefilled()
            await answering
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _open_answer(self, body: dict[str, Any]) -> None:
        """Send the request to the engine that answers, and wait for the whole answer or the first event."""
        engine = self._waits_for = self._engine
        reply = await self._wait(self._send(engine, body))
        if reply.status == 200 and reply.is_event_stream:
            await self._read_first_event(engine, reply)
        else:
            await self._read_final_answer(engine, reply)

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the prompt computed; returns the prefill engine's answer, or sets `status` to the client's error."""
        engine = self._waits_for = self._prefill_engine
        reply = await self._wait(self._send(engine, self._api.prefill_body(body)))
        answer, content = await self._read_answer(engine, reply)
        if self.status != 200:
            self.content = content
            return answer
        self._prefill_usage = self._api.usage(answer)
        self._prefilled()
        return answer

    async def _send(self, engine: EngineConnection, body: dict[str, Any]) -> Reply:
        if self._reply is not None:
            self._reply.close()
            self._reply = None
        try:
            content = dumps(body)
        except NotJson as exc:  # the client's body can be sent, so the other engine's answer is to blame
            raise EngineFailed(self.target.prefill, "returned kv_transfer_params that cannot be sent on") from exc
        with engine_errors(engine.name):
            request_id = self._request.routing.request_id
            self._reply = await engine.upstream.post(self._api.path, content, request_id, self._headers)
        return self._reply

    async def _read_answer(self, engine: EngineConnection, reply: Reply) -> tuple[dict[str, Any], bytes]:
        """A whole answer, decoded and raw; sets `status`."""
        with engine_errors(engine.name):
            content = await (reply.read_all() if reply.is_complete else self._wait(reply.read_all()))
        answer = parse_answer(engine.name, reply.status, reply.headers, content, self._api.is_answer)
        self._check_adapter(engine, reply.status, answer)
        self.status = reply.status
        return answer, content

    def _check_adapter(self, engine: EngineConnection, status: int, answer: dict[str, Any]) -> None:
        adapter = self._request.routing.adapter
        if adapter and status == 404 and adapter in error_text(answer.get("error")):
            raise AdapterGone(engine.name, f"does not have the adapter '{adapter}' any more")

    async def _read_final_answer(self, engine: EngineConnection, reply: Reply) -> None:
        content_type = reply.headers.get("content-type", "application/json")
        if reply.status == 200 and not self._api.generates and "json" not in content_type:  # embeddings as bytes
            with engine_errors(engine.name):
                self.content = await self._wait(reply.read_all())
            self.content_type = content_type
            self.observer.ended()
            return
        answer, self.content = await self._read_answer(engine, reply)
        if self.status != 200:
            return
        is_whole = not isinstance(answer, Outline)  # the usage of a larger one stays as the engine gave it
        if self._prefill_usage is not None and is_whole and isinstance(usage := answer.get("usage"), dict):
            answer = answer | {"usage": self._api.pair_usage(usage, self._prefill_usage)}
            try:
                self.content = dumps(answer)
            except NotJson as exc:
                raise EngineFailed(engine.name, f"answered with something that cannot be sent on: {exc}") from exc
        self._note_stored(answer)
        self.observer.saw_usage(self._api.usage(answer), is_total=True)
        self.observer.ended()

    async def _read_first_event(self, engine: EngineConnection, reply: Reply) -> None:
        self._relay = relay = StreamRelay(
            engine.name,
            reply,
            self.observer,
            self._api.events,
            shows_usage=self._request.wants_usage,
            prefill_usage=self._prefill_usage,
            rewrite=self._rewrite,
        )
        first = await self._wait(relay.read_first_event())
        error = first.error
        if error is None:
            self._note_stored(first.body or {})
            return
        code = error.get("code")
        if not isinstance(code, int) or not 400 <= code < 500:
            raise EngineFailed(engine.name, f"failed: {error_text(error)}")
        try:
            content = dumps(self._api.error_body(error))
        except NotJson as exc:
            raise EngineFailed(engine.name, f"answered with something that cannot be sent on: {exc}") from exc
        # Raises for the engine's faults and its load, not for the client's errors.
        parse_answer(engine.name, code, {}, content, self._api.is_answer)
        self.status, self.content = code, content

    def _note_stored(self, answer: dict[str, Any]) -> None:
        if answer_id := self._api.stored_id(self._request.body, answer):
            self._reservation.stored(answer_id)

    async def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`, unless the engine stays silent for too long or `abort` is called meanwhile."""
        if self._aborted is not None:
            work.close()
            raise self._aborted
        timeout_s = self._timeout_s
        try:
            async with asyncio.timeout(timeout_s) as self._timeout:
                return await work
        except TimeoutError as exc:
            silent = EngineTimeout(self._waits_for.name, f"sent nothing within request_timeout_s={timeout_s:g}")
            raise self._aborted or silent from exc
        except EngineFailed as exc:  # if the engine is gone, the connection may break first
            raise self._aborted or exc from exc
        finally:
            self._timeout = None

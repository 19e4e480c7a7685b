"""The attempts of one request, one after the other: retries before the first byte, and moves of a stream after it.

A stream can move after tokens were shown if the request allows it (`continuation`) and the engines give token ids.
Otherwise it ends with the engine's error, which says why it did not go on.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.relay.answers import parse_answer
from tandem.frontend.relay.apis import CHAT, COMPLETIONS
from tandem.frontend.relay.attempt import EngineAttempt
from tandem.frontend.relay.attempt_trace import Loss
from tandem.frontend.relay.client_request import ClientRequest
from tandem.frontend.relay.connections import EngineConnections, in_time
from tandem.frontend.relay.continuation import continued_body, obstacle, stops_of
from tandem.frontend.relay.joint import CannotContinue, ContinuedStream, Joint, find_joint
from tandem.frontend.relay.observer import AttemptObserver
from tandem.frontend.relay.stream_ledger import StreamLedger
from tandem.frontend.relay.stream_relay import Rewrite
from tandem.protocol.digest import token_bytes
from tandem.protocol.errors import NoWorker
from tandem.router.engines.dispatcher import Dispatcher, EngineTarget
from tandem.router.engines.errors import EngineBusy, EngineFailed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptLimits:
    """Limits of all attempts of a request."""

    max_attempts: int  # before the first byte, each on another engine
    timeout_s: float  # longest silence of an engine
    max_moves: int = 0  # of a stream; 0 = it ends with its engine, and none is asked for token ids
    probe_timeout_s: float = 10.0  # for asking an engine for the text of a stream's tokens


class Attempts:
    """The attempts of one request. Its owner calls `close` on every path; later calls change nothing."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        connections: EngineConnections,
        request: ClientRequest,
        metrics: FrontendMetrics,
        limits: AttemptLimits,
    ) -> None:
        self._dispatcher = dispatcher
        self._connections = connections
        self._request = request
        self._metrics = metrics
        self._limits = limits
        self._attempt: EngineAttempt | None = None
        self._numbers = itertools.count()
        self._num_moves = 0
        self._aborted: tuple[str, str] | None = (
            None  # why the next attempt must not begin: the engine, and what is wrong
        )
        may_move = request.routing.is_stream and limits.max_moves > 0
        self._obstacle = obstacle(request.api, request.body) if may_move else "streams do not move"
        self._reservation = dispatcher.reserve(request.routing, self._abort)

    async def open(self) -> EngineAttempt:
        """The first attempt that gets an answer. Raises a `ServingError`."""
        attempt = self._begin(await self._reservation.place())
        tried: set[str] = set()
        while True:
            try:
                await attempt.open()
                return attempt
            except (EngineFailed, EngineBusy) as exc:
                last: EngineFailed | EngineBusy = exc
                tried.add(exc.engine)
            self._end_attempt()
            if len(tried) == self._limits.max_attempts:
                raise last
            try:
                attempt = self._begin(await self._reservation.place_elsewhere())
            except NoWorker:
                raise last from None  # it says more than "no engine is left"
            except EngineBusy:
                if isinstance(last, EngineFailed):
                    raise last from None
                raise  # with the shortest wait of all engines

    async def relay(self, writer: ResponseWriter) -> bytes:
        """Forward the stream of the attempt that `open` returned, and of those that go on with it.

        Returns the last events, which are not sent yet. Raises a `ServingError`, and what `writer` raises.
        """
        attempt = self._attempt
        assert attempt is not None, "it is open"
        while True:
            try:
                return await attempt.relay(writer)
            except EngineFailed as exc:
                failure = exc
            ledger = attempt.ledger
            if ledger is not None and ledger.is_finished and ledger.prompt_ids is not None and not ledger.flaw:
                return attempt.end_with(ledger.ending())
            attempt = await self._go_on(attempt, failure)

    def close(self) -> None:
        """End the running attempt and release the reservation."""
        self._end_attempt()
        self._reservation.release()

    def _begin(self, target: EngineTarget) -> EngineAttempt:
        ledger = None
        if target.gives_token_ids and not self._obstacle:
            body = self._request.body
            options = body.get("stream_options")
            ledger = StreamLedger(
                is_chat=self._request.api is CHAT,
                shows_ids=body.get("return_token_ids") is True,
                shows_running_usage=isinstance(options, dict) and bool(options.get("continuous_usage_stats")),
            )
        return self._attempt_on(target, self._request, ledger, None if ledger is None else ledger.follow)

    def _attempt_on(
        self,
        target: EngineTarget,
        request: ClientRequest,
        ledger: StreamLedger | None,
        rewrite: Rewrite | None,
        former: AttemptObserver | None = None,
        loss: Loss | None = None,
    ) -> EngineAttempt:
        attempt = self._attempt = EngineAttempt(
            self._reservation,
            target,
            self._connections,
            request,
            self._metrics,
            timeout_s=self._limits.timeout_s,
            now=self._dispatcher.now,
            number=next(self._numbers),
            ledger=ledger,
            rewrite=rewrite,
            former=former,
            loss=loss,
        )
        if self._aborted is not None:
            attempt.abort(*self._aborted)
            self._aborted = None
        return attempt

    def _end_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()

    def _abort(self, engine: str, reason: str) -> None:
        if self._attempt is None:
            self._aborted = engine, reason  # its target is booked, but the attempt has not begun
        else:
            self._attempt.abort(engine, reason)

    # -- moves of a stream

    async def _go_on(self, former: EngineAttempt, failure: EngineFailed) -> EngineAttempt:
        """An attempt that goes on with the stream of `former`. Raises a `ServingError` that says why none does."""
        ledger = self._movable(former, failure)
        lost_s = time.monotonic()
        while True:
            if self._num_moves == self._limits.max_moves:
                raise failure.because(f"it has moved max_moves={self._limits.max_moves} times")
            self._num_moves += 1
            self._end_attempt()
            num_tokens = len(ledger.output_ids)
            name, engine = self._request.routing.request_id, failure.engine
            # NOTE: not the failure's message, which may quote the request.
            logger.debug("request %s leaves %s behind %d tokens: %s", name, engine, num_tokens, failure.cause)
            try:
                prompt = token_bytes([*(ledger.prompt_ids or ()), *ledger.output_ids])
                target = await self._reservation.go_on(failure.cause, prompt, num_tokens)
            except (NoWorker, EngineBusy) as exc:
                raise failure.because(exc.message) from exc
            loss = Loss(lost_s, failure.cause, num_tokens)
            try:
                return await self._continued(target, ledger, former.observer, loss)
            except CannotContinue as exc:
                raise failure.because(str(exc)) from exc
            except EngineFailed as exc:
                failure = exc
            except EngineBusy as exc:
                failure = EngineFailed(exc.engine, exc.message)

    def _movable(self, former: EngineAttempt, failure: EngineFailed) -> StreamLedger:
        """The ledger of a stream that can go on. For others, raises the failure with the reason."""
        if not self._limits.max_moves:
            raise failure
        ledger, why = former.ledger, self._obstacle
        if ledger is None:
            raise failure.because(why or f"engine {former.target.decode} gives no token ids") from failure
        why = ledger.flaw
        if not why and ledger.output_ids and ledger.prompt_ids is None:
            why = "its engine gave no token ids of the prompt"
        if why:
            raise failure.because(why) from failure
        return ledger

    async def _continued(
        self, target: EngineTarget, ledger: StreamLedger, former: AttemptObserver, loss: Loss
    ) -> EngineAttempt:
        """The attempt on `target`, whose answer has begun. Raises `EngineFailed`, `EngineBusy`, `CannotContinue`."""
        request, rewrite = self._request, ledger.follow
        if ledger.output_ids:
            stops = stops_of(request.body) or []
            joint = await self._find_joint(target, ledger, stops)
            rewrite = ContinuedStream(ledger, joint, stops).rewrite
            max_model_len = self._dispatcher.max_model_len(request.routing.model)
            body = continued_body(
                request.api, request.body, ledger.prompt_ids or (), ledger.output_ids, max_model_len=max_model_len
            )
            request = replace(request, api=COMPLETIONS, body=body)
        else:
            ledger.restart()
        attempt = self._attempt_on(target, request, ledger, rewrite, former, loss)
        await attempt.open()
        if attempt.content is not None:
            self._reservation.failed(target.decode)
            text = attempt.content[:200].decode(errors="replace")
            raise EngineFailed(target.decode, f"answered {attempt.status} where a stream should go on: {text}")
        return attempt

    async def _find_joint(self, target: EngineTarget, ledger: StreamLedger, stops: list[str]) -> Joint:
        max_held_chars = max(map(len, stops), default=1) - 1
        decode = partial(self._decode, target.decode)
        try:
            return await find_joint(ledger.prompt_ids or (), ledger.output_ids, ledger.text, max_held_chars, decode)
        except EngineFailed as exc:
            self._reservation.failed(exc.engine, is_absent=exc.is_absent, is_lost=exc.is_lost)
            raise

    async def _decode(self, engine: str, token_ids: list[int]) -> str:
        """The text of token ids, as the engine decodes them. Raises `EngineFailed` or `EngineBusy`."""
        timeout_s = self._limits.probe_timeout_s
        content = msgspec.json.encode({"model": self._request.routing.model, "tokens": token_ids})
        async with in_time(timeout_s, EngineFailed(engine, f"decoded no tokens within {timeout_s:g} s")):
            request_id = self._request.routing.request_id
            reply = await self._connections[engine].upstream.post("/detokenize", content, request_id)
            try:
                answer_bytes = await reply.read_all()
            finally:
                reply.close()
        answer = parse_answer(engine, reply.status, reply.headers, answer_bytes, lambda found: "prompt" in found)
        text = answer.get("prompt")
        if reply.status != 200 or not isinstance(text, str):
            raise EngineFailed(engine, f"answered {reply.status} to /detokenize, where a stream should go on")
        return text

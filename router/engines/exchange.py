"""One request on the engine, or the pair, it was placed on: booked, sent, read, learned from, given back.

    one engine   body -> engine
    a pair       body, max_tokens=1, "keep the KV" -> prefill engine;  body + where the KV is -> decode engine
                 (vLLM's NIXL flow: the decode engine reads the blocks; the first token comes from it)

Up to the first byte a failure is an exception, so the request can go elsewhere; after it the stream breaks.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson

from tandem.protocol.digest import CacheScope
from tandem.router.engines.engine import RemoteEngine
from tandem.router.engines.errors import EngineBusy, EngineFailed, engine_errors
from tandem.router.engines.fleet import EngineFleet, Placed
from tandem.router.engines.sse import Event, EventSplitter, first_event, leading_pieces, parse_event, split_events
from tandem.router.engines.upstream import Reply
from tandem.router.http.metrics import EdgeMetrics, RequestClock
from tandem.router.http.request_options import RequestOptions
from tandem.router.http.response_writer import ResponseWriter
from tandem.runtime.idle_timeout import IdleTimeout
from tandem.scheduling.cost_model import StepModel

__all__ = ["Call", "Exchange"]

T = TypeVar("T")

DEFAULT_RETRY_AFTER_S = 1.0  # of a refusal that does not say
MIN_TRANSFER_S = 1e-4
MAX_ERROR_CHARS = 500  # of what an engine says
_TELLS_USAGE = {"vllm", "sglang", "llamacpp"}  # kinds that know stream_options.include_usage
_KEEP_KV: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A client's request, as far as the router reads it. The body goes on as it is, but for its `cache_salt`."""

    request_id: str
    path: str
    body: dict[str, Any]
    model: str
    token_ids: list[int]
    cache_scope: CacheScope  # whose cached blocks it may use
    arrived_s: float  # of time.perf_counter
    wishes: RequestOptions

    @property
    def is_stream(self) -> bool:
        """Whether the answer is to come in pieces."""
        return bool(self.body.get("stream"))

    @property
    def wants_usage(self) -> bool:
        """Whether the client asked for usage in its stream."""
        options = self.body.get("stream_options")
        return isinstance(options, dict) and bool(options.get("include_usage"))

    @property
    def explains(self) -> bool:
        """Whether the answer is to say why it comes from where it comes."""
        return self.wishes.explains

    def body_for(self, engine: RemoteEngine) -> dict[str, Any]:
        """What is sent: usage is always asked for, it tells what was cached.

        The salt is our name of the scope, never the client's own: an engine shares blocks among requests of one salt.
        """
        body = self.body
        if self.cache_scope:
            body = body | {"cache_salt": self.cache_scope}
            if not engine.spec.cache_salt:
                del body["cache_salt"]
        options = body.get("stream_options") or {}
        if not self.is_stream or engine.spec.kind not in _TELLS_USAGE or not isinstance(options, dict):
            return body
        return body | {"stream_options": options | {"include_usage": True}}


class Exchange:
    """Whoever makes one closes it."""

    def __init__(self, fleet: EngineFleet, placed: Placed, call: Call, metrics: EdgeMetrics) -> None:
        self.status = 200
        self.content: bytes | None = None  # a plain answer, or the client's error; None for a stream
        self.content_type = "application/json"
        self.on_first_token: Callable[[], None] = _nothing
        self.on_end: Callable[[int], None] = _nothing  # with the length of the answer, in tokens
        self._fleet = fleet
        self._placed = placed
        self._call = call
        self._clock = RequestClock(metrics, call.arrived_s)
        self._metrics = metrics
        self._reply: Reply | None = None
        self._first = b""  # events that came while the first one was waited for
        self._splitter = EventSplitter()
        self._has_answer = False
        self._last = b""  # events that came with its end
        self._is_done = False
        self._aborted: EngineFailed | None = None
        self._broken: EngineFailed | None = None  # by an event, after what came before it
        self._scope: asyncio.Timeout | None = None
        self._watch: IdleTimeout | None = None  # of a stream
        self._waits_for = placed.decode
        self._belief: asyncio.TimerHandle | None = None
        self._num_events = 0
        self._last_event_s = 0.0
        self._usage: dict[str, Any] = {}
        self._lengths = (0, 0)  # of prompt and answer, once it has come to its end
        self._prefill_usage: dict[str, Any] | None = None
        self._begin()

    @property
    def engine(self) -> RemoteEngine:
        """The engine the answer comes from."""
        return self._placed.decode

    @property
    def num_expected_cached_tokens(self) -> int:
        """Prompt tokens that the prefix index expected to be cached where the prompt is computed."""
        return self._placed.placement.best.num_cached_tokens

    @property
    def has_answer(self) -> bool:
        """Whether its first byte has come."""
        return self._has_answer

    def abort(self, reason: str) -> None:
        """End it now, with an error that names the engine."""
        self._aborted = EngineFailed(self._waits_for.name, reason)
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())
        elif self._reply is not None:
            self._reply.fail(self._aborted)

    async def open(self) -> None:
        """Send the request and wait for the whole plain answer, or the first event of a stream.

        Raises `EngineFailed` or `EngineBusy`: then the request may go elsewhere.
        """
        try:
            await self._open()
        except EngineFailed as exc:
            engine = self._fleet.get(exc.engine)
            if engine is not None:
                self._report_failure(engine, is_absent=exc.is_absent)
            raise
        self._has_answer = True
        for engine in list(self._trials):
            self._trials.pop(engine)
            engine.breaker.succeeded()

    async def relay(self, outlet: ResponseWriter) -> bytes:
        """Have the events of a stream shown as they came, all that one read brought at a time; returns the last ones.

        While the client keeps up they are shown in the callback that brings them: a task's turn for each would cost as
        much as all else that is done with it. Raises `EngineFailed`, and what the outlet raises.
        """
        assert self._reply is not None, "it is a stream"
        timeout_s = self._fleet.config.request_timeout_s
        reason = f"sent nothing within request_timeout_s={timeout_s:g}"
        self._watch = watch = IdleTimeout(timeout_s, lambda: self.abort(reason))
        take = partial(self._take, outlet, watch)
        try:
            self._pass_on(outlet, self._first)
            while not self._is_done:
                await outlet.drained()
                if self._broken is not None:
                    raise self._broken
                watch.begin()
                with engine_errors(self.engine.name):
                    has_ended = await self._reply.pour(take)
                watch.end()
                if has_ended:
                    raise self._ended_early()
            return self._last
        except EngineFailed:
            self._report_failure(self.engine, is_absent=False)
            raise

    def prefill_done(self) -> None:
        """Its prompt waits no longer."""
        self._booking.prefill_done()

    def close(self) -> None:
        """End what still runs and take the load off again, on every way out."""
        self.release()
        if self._watch is not None:
            self._watch.close()
        if self._reply is not None:
            self._reply.close(is_ending=self._is_done)

    def release(self) -> None:
        """Take the load off again; all there is to do where nothing was sent."""
        self._clock.tell()
        self._booking.release(*self._lengths)
        if self._belief is not None:
            self._belief.cancel()
        for engine in self._engines:
            engine.end(self)
        for engine, trial in self._trials.items():
            engine.breaker.abandoned(trial=trial)
        self._trials.clear()

    # -- before the first byte --------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Let the next decision see this one. NOTE: no `await` between deciding and booking."""
        placement, fleet, now = self._placed.placement, self._fleet, self._fleet.clock()
        self._engines = list(dict.fromkeys((self._placed.prefill, self._placed.decode)))
        self._trials = {engine: engine.breaker.begin(now) for engine in self._engines}
        for engine in self._engines:
            engine.begin(self)
        self._booking = fleet.book(self._placed)
        self._sent_s = now
        if not self._call.is_stream and not self._placed.is_pair:
            # Nobody tells when the first token of a plain answer is there: the prediction has to do.
            loop = asyncio.get_running_loop()
            self._belief = loop.call_later(placement.best.terms.ttft_s, self._booking.prefill_done)

    async def _open(self) -> None:
        body = self._call.body_for(self.engine)
        if self._placed.is_pair:
            handed = await self._prefill(body)
            if handed is None:
                return  # the client's own error
            body = handed
        engine = self._waits_for = self.engine
        reply = await self._wait(self._send(engine, body))
        if reply.status == 200 and reply.headers.get("content-type", "").startswith("text/event-stream"):
            await self._take_first_event(engine, reply)
        else:
            await self._take_plain(engine, reply)

    async def _prefill(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """Have the prompt computed; the body for the decode engine, or None when the request itself is wrong."""
        engine = self._waits_for = self._placed.prefill
        first = body | {"stream": False, "max_tokens": 1, "kv_transfer_params": _KEEP_KV}
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        for name in ("stream_options", "min_tokens"):
            first.pop(name, None)
        await self._take_plain(engine, await self._wait(self._send(engine, first)))
        if self.status != 200:
            return None
        assert self.content is not None, "a plain answer has content"
        answer = orjson.loads(self.content)
        self.content = None
        now = self._fleet.clock()
        self._prefill_usage = _dict(answer.get("usage"))
        self._learn_first_token(engine, now)
        self._sent_s = now
        params = answer.get("kv_transfer_params")
        if isinstance(params, dict):
            return body | {"kv_transfer_params": params}
        if answer["choices"][0].get("finish_reason") == "stop":
            return body  # its first token ends the answer: vLLM keeps no KV then, and the decode engine finds the same
        raise EngineFailed(
            engine.name,
            "returned no kv_transfer_params; start it with --kv-transfer-config "
            '\'{"kv_connector": "NixlConnector", "kv_role": "kv_both"}\', or give it role both',
        )

    async def _send(self, engine: RemoteEngine, body: dict[str, Any]) -> Reply:
        if self._reply is not None:
            self._reply.close()
            self._reply = None
        try:
            content = orjson.dumps(body)
        except orjson.JSONEncodeError as exc:  # what the client sent can be: it is the other engine's
            raise EngineFailed(self._placed.prefill.name, "returned kv_transfer_params that cannot be sent on") from exc
        with engine_errors(engine.name):
            self._reply = await engine.upstream.post(self._call.path, content, self._call.request_id)
        return self._reply

    async def _take_plain(self, engine: RemoteEngine, reply: Reply) -> None:
        """A whole answer: the engine's, or its refusal."""
        with engine_errors(engine.name):
            content = await self._wait(reply.read_all())
        self._refuse(engine, reply, content)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as exc:
            raise EngineFailed(engine.name, f"answered {reply.status} with something that is no JSON") from exc
        if not isinstance(answer, dict) or (reply.status == 200 and not _has_choices(answer)):
            raise EngineFailed(engine.name, f"answered {reply.status} without choices")
        self.status, self.content = reply.status, content
        if reply.status == 200 and engine is self.engine:
            usage = answer.get("usage")
            if isinstance(usage, dict) and self._prefill_usage is not None:
                try:
                    self.content = orjson.dumps(answer | {"usage": self._true_usage(usage)})
                except orjson.JSONEncodeError as exc:
                    raise EngineFailed(engine.name, f"answered with something that cannot be sent on: {exc}") from exc
            self._note_usage(usage if isinstance(usage, dict) else {})
            self._note_end()

    def _refuse(self, engine: RemoteEngine, reply: Reply, content: bytes) -> None:
        """Raise for what is the engine's fault or load; what is the client's passes."""
        status = reply.status
        if status == 429 or (status == 503 and "retry-after" in reply.headers):
            wait_s = _retry_after_s(reply.headers.get("retry-after", ""))
            engine.hold_back(wait_s, self._fleet.clock())
            message = f"engine {engine.name} is busy: {_message(content)}"
            raise EngineBusy(message, retry_after_s=wait_s, engine=engine.name)
        if status in (401, 403):
            raise EngineFailed(engine.name, f"refused our key ({status}); check its api_key_env")
        if status >= 500:
            raise EngineFailed(engine.name, f"answered {status}: {_message(content)}")
        if status != 200 and not 400 <= status < 500:
            raise EngineFailed(engine.name, f"answered {status}, which is no answer")

    async def _take_first_event(self, engine: RemoteEngine, reply: Reply) -> None:
        while (first := first_event(self._first)) is None:  # comments go no further, so none of them are kept
            self._first = await self._wait(self._next_events(reply))
        error = first.error
        if error is None:
            return
        code = error.get("code")
        if not isinstance(code, int) or not 400 <= code < 500:
            raise EngineFailed(engine.name, f"failed: {str(error.get('message', ''))[:MAX_ERROR_CHARS]}")
        self.status, self.content = code, orjson.dumps({"error": error})

    async def _next_events(self, reply: Reply) -> bytes:
        """What comes next of whole events, maybe none."""
        with engine_errors(self.engine.name):
            data = await reply.read()
        if not data:
            raise self._ended_early()
        return self._whole(data)

    # -- the stream ---------------------------------------------------------------------------------------------

    def _take(self, outlet: ResponseWriter, watch: IdleTimeout, parts: list[bytes]) -> bool:
        """Show what came; whether more may come at once."""
        watch.begin()
        return self._pass_on(outlet, self._whole(b"".join(parts)))

    def _pass_on(self, outlet: ResponseWriter, events: bytes) -> bool:
        shown = self._seen(events)
        if self._is_done:
            self._last = shown
            return False
        if shown and not outlet.show(shown):
            return False
        return self._broken is None

    def _whole(self, data: bytes) -> bytes:
        """The events that are complete now, maybe none."""
        try:
            return self._splitter.push(data)
        except ValueError as exc:
            raise EngineFailed(self.engine.name, f"sent {exc}") from exc

    def _ended_early(self) -> EngineFailed:
        return EngineFailed(self.engine.name, "ended its stream in the middle")

    def _seen(self, events: bytes) -> bytes:
        """Learn from events; what of them the client gets. Comments that keep a connection alive go no further."""
        num_pieces, end = leading_pieces(events)
        if num_pieces:
            self._note_tokens(num_pieces)
        if end == len(events):
            return events
        shown = [events[:end]]
        for raw in split_events(events[end:]):
            if leading_pieces(raw)[0]:  # NOTE: not parsed; Python's servers send NaN, which is no JSON
                self._note_tokens(1)
                shown.append(raw)
                continue
            event = parse_event(raw)
            if event.error is not None:
                message = str(event.error.get("message", ""))[:MAX_ERROR_CHARS]
                self._broken = EngineFailed(self.engine.name, f"failed in the middle: {message}")
                break
            if event.has_data and (seen := self._seen_event(event)) is not None:
                shown.append(seen.raw)
            if event.is_done:
                break
        return b"".join(shown)

    def _seen_event(self, event: Event) -> Event | None:
        if event.is_done:
            self._is_done = True
            self._note_end()
        if event.has_choices:
            self._note_tokens(1)
        usage = event.usage
        if usage is None or event.body is None:
            return event
        if self._prefill_usage is not None:
            event = event.with_body(event.body | {"usage": self._true_usage(usage)})
        self._usage = usage
        if not event.has_choices:
            self._note_usage(usage)
            return event if self._call.wants_usage else None
        return event

    def _note_tokens(self, count: int) -> None:
        now = self._fleet.clock()
        if self._num_events == 0:
            self._on_first_token(now)
        elif self.engine.pace.is_gap_due(now):
            self._learn_gap(now)
        self._num_events += count
        self._last_event_s = now
        self._clock.record(count, None)

    def _on_first_token(self, now: float) -> None:
        if self._placed.is_pair:
            self._learn_transfer(now)
        else:
            self._learn_first_token(self.engine, now)
        self.on_first_token()  # NOTE: last; what is learned counts the prompt as waiting still

    async def _wait(self, work: Awaitable[T]) -> T:
        """Result of `work`, unless the engine stays silent for too long or is given up meanwhile."""
        if self._aborted is not None:
            raise self._aborted
        timeout_s = self._fleet.config.request_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as self._scope:
                return await work
        except TimeoutError as exc:
            silent = EngineFailed(self._waits_for.name, f"sent nothing within request_timeout_s={timeout_s:g}")
            raise self._aborted or silent from exc
        finally:
            self._scope = None

    # -- what is learned ------------------------------------------------------------------------------------------

    def _steps(self, engine: RemoteEngine) -> StepModel:
        return self._fleet.costs.steps(engine.spec.cost_kind)

    def _learn_first_token(self, engine: RemoteEngine, now: float) -> None:
        placement = self._placed.placement
        self._fleet.learn_first_token(
            engine,
            placement.best.prefill,
            sent_s=self._sent_s,
            num_new_tokens=placement.num_new_tokens,
            num_cached_tokens=placement.best.num_cached_tokens,
        )
        self._booking.prefill_done(now - self._sent_s)

    def _learn_gap(self, now: float) -> None:
        worker = self._placed.placement.best.decode
        if worker.queued_prompt_tokens:
            return  # a prompt is computed in the same steps
        stats = self.engine.pace.gap(
            duration_s=now - self._last_event_s,
            now=now,
            num_decode_seqs=worker.num_booked_seqs,
            num_kv_tokens=worker.booked_kv_tokens,
        )
        if stats is not None:
            self._steps(self.engine).observe(stats)

    def _learn_transfer(self, now: float) -> None:
        """From the end of prefill to the decode engine's first token: moving the KV, and one of its steps."""
        placement = self._placed.placement
        worker = placement.best.decode
        step_s = self._steps(self.engine).costs.step_s(worker.num_booked_seqs, worker.booked_kv_tokens)
        num_bytes = placement.num_prompt_tokens * self.engine.spec.kv_bytes_per_token
        kinds = self._placed.prefill.spec.cost_kind, self.engine.spec.cost_kind
        self._fleet.costs.transfer(*kinds).observe(num_bytes, max(now - self._sent_s - step_s, MIN_TRANSFER_S))

    def _true_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Usage of a pair: what was cached is what the prefill engine had not to compute, not what it handed over."""
        details = (self._prefill_usage or {}).get("prompt_tokens_details")
        return usage | {"prompt_tokens_details": details}

    def _note_usage(self, usage: dict[str, Any]) -> None:
        self._usage = usage
        source = self._prefill_usage if self._prefill_usage is not None else usage
        details = _dict(source.get("prompt_tokens_details"))
        self._metrics.prompt_tokens.inc(_count(usage.get("prompt_tokens")))
        self._metrics.cached_tokens.inc(_count(details.get("cached_tokens")))
        more = _count(usage.get("completion_tokens")) - self._num_events
        self._metrics.generation_tokens.inc(max(more, 0))

    def _note_end(self) -> None:
        num_prompt = _count(self._usage.get("prompt_tokens")) or len(self._call.token_ids)
        self._lengths = num_prompt, _count(self._usage.get("completion_tokens")) or self._num_events
        self._fleet.note_lengths(*self._lengths)
        self.on_end(self._lengths[1])
        self._metrics.duration_s.observe(time.perf_counter() - self._call.arrived_s)

    def _report_failure(self, engine: RemoteEngine, *, is_absent: bool) -> None:
        engine.num_failures += 1
        trial = self._trials.pop(engine, 0)
        engine.breaker.failed(self._fleet.clock(), trial=trial, is_absent=is_absent)


def _nothing(*_: object) -> None:
    """Where nobody wants to know."""


def _retry_after_s(header: str) -> float:
    """Seconds of a Retry-After, which is a number or a date."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return DEFAULT_RETRY_AFTER_S
    return max(seconds, 0.0) if math.isfinite(seconds) else DEFAULT_RETRY_AFTER_S


def _message(content: bytes) -> str:
    """What an engine says went wrong, as short as can be."""
    try:
        body = orjson.loads(content)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except orjson.JSONDecodeError:
        text = content.decode(errors="replace")
    return str(text or "no message")[:MAX_ERROR_CHARS]


def _has_choices(answer: dict[str, Any]) -> bool:
    """Whether it brings an answer, as far as it is read here."""
    choices = answer.get("choices")
    return isinstance(choices, list) and bool(choices) and all(isinstance(choice, dict) for choice in choices)


def _dict(value: Any) -> dict[str, Any]:
    """What an engine says under a key, where it says what it should."""
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0

"""The routes of engines that are forwarded: read a request, place it, relay its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.errors import ClientDisconnected, serving_error_body
from tandem.frontend.http.heartbeat import Heartbeat
from tandem.frontend.http.json_body import read_json
from tandem.frontend.http.metrics import FrontendMetrics
from tandem.frontend.http.request_options import EXPLAIN_HEADER, key_use_of, request_options, trace_headers_of
from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.http.sessions import conversation_named, routing_session
from tandem.frontend.http.text_work import work_on_text
from tandem.frontend.http.wrong_value import shown
from tandem.frontend.openai.sampling import UNKNOWN_CONTEXT_TOKENS
from tandem.frontend.relay.answers import as_count, as_dict
from tandem.frontend.relay.apis import CHAT, RESPONSES, Api
from tandem.frontend.relay.attempt import EngineAttempt
from tandem.frontend.relay.attempts import AttemptLimits, Attempts
from tandem.frontend.relay.client_request import ClientRequest
from tandem.frontend.relay.connections import EngineConnections
from tandem.frontend.relay.prompts import PromptReader, cache_salt_of, priority_of
from tandem.protocol.digest import token_bytes
from tandem.protocol.errors import ModelNotFound, NoWorker, RequestError, ServingError
from tandem.router.engines.bounded_json import is_too_deep
from tandem.router.engines.dispatcher import Dispatcher, DispatchRequest, EngineTarget
from tandem.router.engines.errors import EngineFailed
from tandem.scheduling.admission.tenants import CacheScopes
from tandem.text.tokenizer import TokenizerPool

# Fields that tell an engine where KV comes from and which of its ranks computes. Only the router may set them: a client
# could read the KV of others, or make an engine connect to any host. docs/engines.md has the reason for each.
_ROUTER_FIELDS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params"),  # vLLM
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),  # SGLang
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("session_params", "extra_key", "custom_logit_processor"),
        *("id_slot", "slot_id"),  # llama.cpp
    }
)
MAX_OUTPUT_TOKENS = 1 << 20  # assumed for a request that sets no limit
_REQUEST_IDS = ("request_id", "rid")  # the router sets the id
_MAX_ANSWERS = 2048

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Forwarder:
    """Answers clients with the answers of engines."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        connections: EngineConnections,
        scopes: CacheScopes,
        readers: Mapping[str, PromptReader],
        pool: TokenizerPool,
        metrics: FrontendMetrics,
        limits: AttemptLimits,
    ) -> None:
        self._dispatcher = dispatcher
        self._connections = connections
        self._scopes = scopes
        self._readers = readers
        self._text = PromptReader()
        self._pool = pool
        self._metrics = metrics
        self._limits = limits

    async def explain(self, request: Request) -> list[dict[str, Any]]:
        """The decision that would be made now. Nothing is sent or booked. Raises a `ServingError`."""
        return [await self._dispatcher.explain((await self._asked(request)).routing)]

    async def answer(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises a `ServingError` for a failure before the first byte."""
        request = await self._asked(Request(scope, receive), api)
        num_answers = _num_answers(request)
        if request.key_use is not None:
            max_tokens = num_answers * request.routing.max_tokens
            await request.key_use.charge(request.routing.num_prompt_tokens, num_answers, max_tokens)
        attempts = Attempts(self._dispatcher, self._connections, request, self._metrics, self._limits)
        request.pack()
        writer, response = ResponseWriter(scope, send), None
        self._metrics.running_requests.inc(num_answers)
        try:
            async with cancel_on_disconnect(receive):
                with Heartbeat(writer, _STREAM_HEADERS, api.path) if request.routing.is_stream else nullcontext():
                    response = await self._relay(request, attempts, writer)
                if response is not None:
                    attempts.close()
                    await response(scope, receive, writer.send)
        except ClientDisconnected:
            self._metrics.client_disconnects.inc()
            if response is None and not writer.has_started:
                raise
        finally:
            self._metrics.running_requests.dec(num_answers)
            writer.close()
            attempts.close()

    async def _asked(self, http_request: Request, api: Api | None = None) -> ClientRequest:
        """Read a request. Without an API, its body tells which one it is for."""
        arrived_s = time.perf_counter()
        raw, body = await read_object(http_request)
        _check_fields(body)
        return await self._read(http_request, api or (RESPONSES if "input" in body else CHAT), raw, body, arrived_s)

    async def _read(
        self, http_request: Request, api: Api, raw: bytes, body: dict[str, Any], arrived_s: float
    ) -> ClientRequest:
        model, adapter = self._model_of(body)
        options = request_options(http_request, priority_of(body))
        scope = self._scopes.of(options.service_class.tenant, cache_salt_of(body))
        conversation_id = conversation_named(options.headers, None, body.get("prompt_cache_key"))
        session = routing_session(conversation_id, body.get("user"))
        reader = self._readers.get(model, self._text)
        max_tokens = self._dispatcher.max_model_len(model) or UNKNOWN_CONTEXT_TOKENS
        prompt = await work_on_text(
            http_request, self._pool, lambda: reader.read(api.form(body), scope, max_tokens), len(raw)
        )
        routing = DispatchRequest(
            request_id=options.request_id.unique,
            model=model,
            adapter=adapter,
            can_hand_over=api.can_hand_over(body),
            stored_before=api.stored_before(body),
            prompt=token_bytes(prompt.token_ids),
            is_exact=prompt.is_exact,
            cache_scope=scope,
            max_tokens=api.max_tokens(body) or MAX_OUTPUT_TOKENS,
            is_stream=api.generates and bool(body.get("stream")),
            service_class=msgspec.structs.replace(options.service_class, session=session),
            explains=options.explains,
            traceparent=options.traceparent,
            generates=api.generates,
        )
        return ClientRequest(
            api=api,
            body=body,
            routing=routing,
            arrived_s=arrived_s,
            span=options.span,
            trace_headers=trace_headers_of(http_request.scope),
            conversation_id=conversation_id,
            key_use=key_use_of(http_request),
        )

    def _model_of(self, body: dict[str, Any]) -> tuple[str, str]:
        """The model and the adapter ("" = none) of a request, which need not name its model if there is only one."""
        model, known = body.get("model"), self._dispatcher.models
        if isinstance(model, str) and model:
            if model not in known:
                if base := self._dispatcher.adapters.get(model):
                    return base, model
                if silent := self._dispatcher.unknown_engines:
                    raise NoWorker(
                        f"no engine is known to serve {model[:200]} yet; not reached so far: {', '.join(silent)}"
                    )
                raise ModelNotFound(f"The model '{model[:200]}' does not exist.", param="model")
            return model, ""
        if model is not None and not isinstance(model, str):
            raise RequestError(
                f"Invalid value for 'model': expected a string, got {shown(msgspec.json.encode(model))}.", param="model"
            )
        if not known:
            has_engines = bool(self._dispatcher.unknown_engines)
            raise NoWorker("no engine has reported its model yet" if has_engines else "there is no engine")
        if len(known) > 1:
            raise RequestError(f"Name the model: one of {', '.join(known)}.", param="model")
        body["model"] = known[0]
        return known[0], ""

    async def _relay(self, request: ClientRequest, attempts: Attempts, writer: ResponseWriter) -> Response | None:
        """Send a stream to its end, or return a plain answer, which is still to be sent.

        Raises a `ServingError` for a failure before the head of a stream.
        """
        attempt = None
        try:
            attempt = await attempts.open()
            headers = _headers(attempt.target)
            if attempt.content is None:
                if not writer.has_started:
                    raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
                    await writer.start(raw_headers + _STREAM_HEADERS)
                await writer.drain()
                last = await attempts.relay(writer)
            elif writer.has_started:
                last = self._error_event(
                    request, _late_error(attempt, attempt.content), is_served=attempt.status == 200
                )
            else:
                return Response(attempt.content, attempt.status, headers, attempt.content_type)
        except ServingError as exc:
            if not writer.has_started:
                raise
            last = self._error_event(request, _error_of(exc), is_served=attempt is not None)
        await writer.end(last)
        return None

    def _error_event(self, request: ClientRequest, error: dict[str, Any], *, is_served: bool) -> bytes:
        self._metrics.stream_errors.inc()
        if not is_served and request.key_use is not None:
            request.key_use.num_prompt_tokens = 0  # as if it were refused
        return request.api.events.error(error)


def _error_of(exc: ServingError) -> dict[str, Any]:
    """One of our own errors as an engine would send it."""
    return msgspec.structs.asdict(serving_error_body(exc).error)


def _late_error(attempt: EngineAttempt, content: bytes) -> dict[str, Any]:
    """The error object for a plain answer that comes when a stream has begun: mostly the client's own error."""
    if attempt.status == 200:
        failure = EngineFailed(attempt.target.decode, "answered without a stream")
        return _error_of(failure)
    answer = as_dict(msgspec.json.decode(content))
    return as_dict(answer.get("error")) or answer


def _headers(target: EngineTarget) -> dict[str, str]:
    headers = {
        "x-tandem-engine": target.decode,
        "x-tandem-expected-cached-tokens": str(target.num_expected_cached_tokens),
    }
    if target.expected_tier:
        headers["x-tandem-expected-tier"] = target.expected_tier
    if target.decision is not None:
        headers[EXPLAIN_HEADER] = json.dumps(target.decision, separators=(",", ":"))
    return headers


def _num_answers(request: ClientRequest) -> int:
    """Number of answers that are generated, as far as the router reads the body; the engine checks it."""
    return min(as_count(request.body.get("n")) or 1, _MAX_ANSWERS) if request.api.generates else 0


async def read_object(request: Request) -> tuple[bytes, dict[str, Any]]:
    """The JSON object of a request, raw and decoded. It can be encoded again. Raises `RequestError`."""
    raw = await read_json(request)
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"The request body is not valid JSON: {exc}") from exc
    except RecursionError as exc:
        raise RequestError("The request body is nested too deeply.") from exc
    if not isinstance(body, dict):
        raise RequestError(f"Invalid request body: expected an object, got {shown(raw.strip())}.")
    if is_too_deep(body, raw):
        raise RequestError("The request body is nested too deeply.")
    return raw, body


def _check_fields(body: dict[str, Any]) -> None:
    """Remove request ids from a body. Raises `RequestError` for fields that must not reach an engine."""
    for name in _ROUTER_FIELDS & body.keys():
        if body.pop(name) is not None:
            raise RequestError(
                f"'{name}' is for the router to set; leave it out.", param=name, code="unsupported_parameter"
            )
    for name in _REQUEST_IDS:
        body.pop(name, None)
    extra = body.get("vllm_xargs")  # vLLM copies them to its extra arguments, where it also finds KV parameters
    if isinstance(extra, dict) and (found := _ROUTER_FIELDS & extra.keys()):
        name = f"vllm_xargs.{min(found)}"
        raise RequestError(
            f"'{name}' is for the router to set; leave it out.", param=name, code="unsupported_parameter"
        )

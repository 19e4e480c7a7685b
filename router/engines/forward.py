"""`/v1/chat/completions` and `/v1/completions` in front of engines: read, place, send, and try elsewhere if it must.

A request goes to another engine before its first byte only: after it the client has part of an answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.protocol.errors import ModelNotFound, NoWorker, RequestError, ServingError
from tandem.router.engines.attempt import Attempt
from tandem.router.engines.client_request import ClientRequest
from tandem.router.engines.errors import EngineBusy, EngineFailed
from tandem.router.engines.fleet import EngineFleet
from tandem.router.engines.prompts import PromptReader, TextReader, cache_salt_of, priority_of
from tandem.router.engines.queues import Queues
from tandem.router.http.disconnect import cancel_on_disconnect
from tandem.router.http.errors import ClientDisconnected, serving_error_body
from tandem.router.http.json_body import read_json
from tandem.router.http.metrics import EdgeMetrics
from tandem.router.http.request_options import EXPLAIN_HEADER, request_options
from tandem.router.http.response_writer import ResponseWriter
from tandem.router.openai.answer import new_answer_id
from tandem.router.openai.sampling import UNKNOWN_CONTEXT_TOKENS
from tandem.router.text.tokenizer import TokenizerPool
from tandem.scheduling.decisions import RoutingDecision
from tandem.scheduling.placement import Placement
from tandem.scheduling.request import PlacementRequest
from tandem.scheduling.tenants import CacheScopes

__all__ = ["Forwarder", "read_object"]

# Fields by which whoever stands in front of engines tells them where KV comes from and which of their parts computes:
# a client's would read foreign KV, or have an engine connect to any host. docs/engines.md has the reason for each.
_ROUTERS_FIELDS = frozenset(
    {
        *("kv_transfer_params", "ec_transfer_params"),  # vLLM
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),  # SGLang
        *("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("session_params", "extra_key", "custom_logit_processor"),
        *("id_slot", "slot_id"),  # llama.cpp
    }
)
_OUR_IDS = ("request_id", "rid")  # of a request: the router gives it one
_MAX_BRACKETS = 250  # more could be nested more deeply than JSON can be written again

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Forwarder:
    """Answers clients with what engines say."""

    def __init__(
        self,
        fleet: EngineFleet,
        scopes: CacheScopes,
        readers: Mapping[str, PromptReader],
        pool: TokenizerPool,
        metrics: EdgeMetrics,
    ) -> None:
        self._fleet = fleet
        self._scopes = scopes
        self._readers = readers
        self._text = TextReader()
        self._pool = pool
        self._metrics = metrics
        self.queues = Queues(fleet, self._book)
        self.num_retries = 0

    async def explain(self, request: Request) -> list[dict[str, Any]]:
        """The decision that would be made now. Nothing is sent or booked. Raises a `ServingError`."""
        raw, body = await read_object(request)
        _check_fields(raw, body)
        asked = await self._read(request, "", raw, body, time.perf_counter())
        return [self.queues.of(asked.model).explain(asked)]

    async def answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises a `ServingError` for a failure before the first byte."""
        arrived_s = time.perf_counter()
        http_request = Request(scope, receive)
        raw, body = await read_object(http_request)
        _check_fields(raw, body)
        request = await self._read(http_request, path, raw, body, arrived_s)
        attempt = None
        writer = ResponseWriter(scope, send)
        try:
            async with cancel_on_disconnect(receive):
                attempt, decision = await self._open(request)
                headers = self._headers(request, attempt, decision)
                if attempt.content is None:
                    await self._relay(attempt, headers, writer)
                else:
                    attempt.close()
                    response = Response(attempt.content, attempt.status, headers, attempt.content_type)
                    await response(scope, receive, writer.send)
        except ClientDisconnected:
            self._metrics.client_disconnects.inc()
            if attempt is None:
                raise
        finally:
            writer.close()
            if attempt is not None:
                attempt.close()

    async def _read(
        self, http_request: Request, path: str, raw: bytes, body: dict[str, Any], arrived_s: float
    ) -> ClientRequest:
        model = self._model_of(body)
        options = request_options(http_request, priority_of(body))
        scope = self._scopes.of(options.service_class.tenant, cache_salt_of(body))
        reader = self._readers.get(model, self._text)
        max_tokens = self._fleet.max_model_len(model) or UNKNOWN_CONTEXT_TOKENS
        token_ids = await self._pool.run(lambda: reader.read(body, scope, max_tokens), num_bytes=len(raw))
        return ClientRequest(
            request_id=new_answer_id("req-"),
            path=path,
            body=body,
            model=model,
            token_ids=token_ids,
            cache_scope=scope,
            arrived_s=arrived_s,
            options=options,
        )

    def _model_of(self, body: dict[str, Any]) -> str:
        """The model asked for; one need not be named where there is but one."""
        model, known = body.get("model"), self._fleet.models
        if isinstance(model, str) and model:
            if model not in known:
                if silent := [engine.name for engine in self._fleet.engines if not engine.spec.model]:
                    raise NoWorker(f"no engine of {model[:200]} is known yet; {', '.join(silent)} may be, once reached")
                raise ModelNotFound(f"The model '{model[:200]}' does not exist.", param="model")
            return model
        if model is not None and not isinstance(model, str):
            raise RequestError("Invalid value for 'model': expected a string.", param="model")
        if not known:
            raise NoWorker("no engine has told its model yet" if self._fleet.engines else "there is no engine")
        if len(known) > 1:
            raise RequestError(f"Name the model: one of {', '.join(known)}.", param="model")
        body["model"] = known[0]
        return known[0]

    async def _open(self, request: ClientRequest) -> tuple[Attempt, RoutingDecision]:
        """The attempt that answers, after waiting in the queue and up to `max_attempts` attempts."""
        queue = self.queues.of(request.model)
        placement_request = queue.placement_request(request)
        admitted = await queue.gate.enter(request, placement_request)
        attempt, decision = admitted.booking, admitted.decision
        tried: set[str] = set()
        while True:
            try:
                await attempt.open(admitted.first_token)
            except (EngineFailed, EngineBusy) as exc:
                attempt.close()
                last: EngineFailed | EngineBusy = exc
                tried.add(exc.engine)
            except BaseException:  # raised again: whatever ends the request gives its booking back
                attempt.close()
                raise
            else:
                return attempt, decision
            if len(tried) == self._fleet.engines_config.max_attempts:
                raise last
            try:
                attempt, decision.placement = queue.try_elsewhere(request, placement_request, tried)
            except (NoWorker, EngineBusy):
                if isinstance(last, EngineFailed):
                    raise last from None  # it says more than that no engine is left
                raise
            self.num_retries += 1

    def _book(
        self,
        request: ClientRequest,
        placement_request: PlacementRequest,
        placement: Placement,
        on_end: Callable[[int], None],
    ) -> Attempt:
        placed = self._fleet.placed(placement_request, placement)
        return Attempt(self._fleet, placed, request, self._metrics, on_end)

    def _headers(self, request: ClientRequest, attempt: Attempt, decision: RoutingDecision) -> dict[str, str]:
        headers = {
            "x-request-id": request.request_id,
            "x-tandem-engine": attempt.engine.name,
            "x-tandem-expected-cached-tokens": str(attempt.num_expected_cached_tokens),
        }
        if request.explains:
            headers[EXPLAIN_HEADER] = json.dumps(decision.to_json(self._fleet.clock()), separators=(",", ":"))
        return headers

    async def _relay(self, attempt: Attempt, headers: dict[str, str], writer: ResponseWriter) -> None:
        raw_headers = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        self._metrics.running_requests.inc()
        try:
            await writer.start(raw_headers + _STREAM_HEADERS)
            last = await attempt.relay(writer)
        except ServingError as exc:
            self._metrics.stream_errors.inc()
            last = b"data: " + orjson.dumps(serving_error_body(exc)) + b"\n\n"
        finally:
            self._metrics.running_requests.dec()
        await writer.end(last)


async def read_object(request: Request) -> tuple[bytes, dict[str, Any]]:
    """The JSON object of a request, raw and decoded. Raises `RequestError`."""
    raw = await read_json(request)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise RequestError(f"The request body is not valid JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise RequestError("Invalid request body: expected an object.")
    return raw, body


def _check_fields(raw: bytes, body: dict[str, Any]) -> None:
    """Take out of a body the ids that the router gives. Raises `RequestError` for what must not reach an engine."""
    for name in _ROUTERS_FIELDS & body.keys():
        if body.pop(name) is not None:
            raise RequestError(
                f"'{name}' is for the router to set; leave it out.", param=name, code="unsupported_parameter"
            )
    for name in _OUR_IDS:
        body.pop(name, None)
    extra = body.get("vllm_xargs")  # these become the engine's own extra arguments, where KV's are looked for
    if isinstance(extra, dict) and (found := _ROUTERS_FIELDS & extra.keys()):
        name = f"vllm_xargs.{min(found)}"
        raise RequestError(
            f"'{name}' is for the router to set; leave it out.", param=name, code="unsupported_parameter"
        )
    if raw.count(b"[") + raw.count(b"{") > _MAX_BRACKETS:
        try:
            orjson.dumps(body)
        except orjson.JSONEncodeError as exc:
            raise RequestError("The request body is nested too deeply.") from exc

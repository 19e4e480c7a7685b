"""`/v1/responses/{id}`: reads, deletes and cancels a response on the engine that keeps it.

Nothing is computed, so these requests wait in no queue and are booked on no engine.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Scope

from tandem.frontend.http.request_id import request_id_of
from tandem.frontend.http.request_options import tenant_of, trace_headers_of
from tandem.frontend.relay.answers import parse_answer
from tandem.frontend.relay.connections import EngineConnection, EngineConnections, in_time
from tandem.router.engines.dispatcher import Dispatcher
from tandem.router.engines.errors import AnswerNotFound, EngineTimeout
from tandem.router.engines.upstream import Reply

_ID = re.compile(r"[A-Za-z0-9_-]{1,256}")


class StoredResponses:
    """Forwards requests about a response to its engine. A tenant reaches its own responses only."""

    def __init__(self, dispatcher: Dispatcher, connections: EngineConnections, timeout_s: float) -> None:
        """`timeout_s` is the longest silence of an engine."""
        self._dispatcher = dispatcher
        self._connections = connections
        self._timeout_s = timeout_s

    async def forward(self, request: Request, response_id: str, action: str = "") -> Response:
        """The engine's answer. Raises `AnswerNotFound`, and `EngineFailed` or `EngineBusy`."""
        if not _ID.fullmatch(response_id):
            raise AnswerNotFound(response_id, "response_id")
        engine = self._connections[await self._dispatcher.answer_owner(response_id, tenant_of(request))]
        query = urlencode(request.query_params.multi_items())
        path = f"/v1/responses/{response_id}{action}" + (f"?{query}" if query else "")
        reply = await self._send(engine, request.method, path, request.scope)
        if reply.is_event_stream:
            return StreamingResponse(self._parts(engine, reply), reply.status, media_type="text/event-stream")
        try:
            async with self._in_time(engine):
                content = await reply.read_all()
        finally:
            reply.close()
        parse_answer(engine.name, reply.status, reply.headers, content, lambda _: True)
        return Response(content, reply.status, media_type="application/json")

    async def _send(self, engine: EngineConnection, method: str, path: str, scope: Scope) -> Reply:
        request_id, trace = request_id_of(scope).unique, trace_headers_of(scope)
        async with self._in_time(engine):
            return await engine.upstream.send(method, path, b"", request_id, trace)

    async def _parts(self, engine: EngineConnection, reply: Reply) -> AsyncIterator[bytes]:
        """The bytes of a stream. An error breaks the connection to the client, which sees that the end is missing."""
        try:
            while True:
                async with self._in_time(engine):
                    part = await reply.read()
                if not part:
                    return
                yield part
        finally:
            reply.close()

    def _in_time(self, engine: EngineConnection) -> AbstractAsyncContextManager[None]:
        timeout_s = self._timeout_s
        return in_time(timeout_s, EngineTimeout(engine.name, f"sent nothing within request_timeout_s={timeout_s:g}"))

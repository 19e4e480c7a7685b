"""The deciding process' side: serves the requests of the edge processes on one backend.

Whoever starts an edge process says so by `expect` and calls `drop` when it has ended, which cancels its requests. What
others send is ignored: a word of a dead process, read late, must start nothing that nobody would end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial

import msgspec
import zmq
from zmq.constants import SocketType

from tandem.protocol.errors import ServingError
from tandem.router.backend import Backend, GenerateRequest, TokenDelta
from tandem.router.openai.readiness import Ready
from tandem.router.processes import wire
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.message_socket import MessageSocket

__all__ = ["EdgeHub"]

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.25
_Work = Callable[[], Coroutine[None, None, None]]  # begun in its task: one that is cancelled before leaves nothing
INTERNAL_ERROR = wire.WireError("ServingError", "Internal server error.", None, "internal_error", 0.0)


class EdgeHub:
    """Whoever makes one calls `start`, and `close` at the end. Used from one event loop only."""

    def __init__(
        self,
        backend: Backend,
        readiness: Ready,
        scrape: Callable[[], bytes],
        endpoint: str,
    ) -> None:
        self._backend = backend
        self._readiness = readiness
        self._scrape = scrape
        self._expected: set[str] = set()
        self._edges: dict[str, _Edge] = {}  # of the expected ones those that have been heard
        self._tasks: set[asyncio.Task[None]] = set()  # of calls; `_told` sees to their errors
        self._background = BackgroundTasks()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(SocketType.ROUTER)
        socket.sndhwm = socket.rcvhwm = 0  # who runs the edge processes ends those that hang
        socket.bind(endpoint)
        self._socket = MessageSocket(socket, self._on_message)

    @property
    def num_running(self) -> int:
        """Sequences that are being generated for clients."""
        return sum(edge.num_running for edge in self._edges.values())

    def start(self) -> None:
        """Begin to serve."""
        self._background.keep("telling edge processes the status", self._tell_status)

    async def close(self) -> None:
        """Cancel everything and close the socket."""
        for edge_id in list(self._edges):
            self.drop(edge_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._background.close(), *self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    def expect(self, edge_id: str) -> None:
        """Listen to an edge process from now on. Its id is never used again after `drop`."""
        self._expected.add(edge_id)

    def drop(self, edge_id: str) -> None:
        """An edge process is gone: cancel what it asked for, and listen to it no more."""
        self._expected.discard(edge_id)
        edge = self._edges.pop(edge_id, None)
        for task in list(edge.calls.values()) if edge is not None else ():
            task.cancel()

    def _on_message(self, frames: list[bytes]) -> None:
        identity, data = frames[0], frames[-1]
        try:
            message = wire.decode_for_hub(data)
        except msgspec.DecodeError as exc:
            logger.warning("edge process %r sent something that is no message: %s", identity, exc)
            return
        if (edge := self._edge(identity)) is not None:
            self._dispatch(edge, message)

    def _edge(self, identity: bytes) -> _Edge | None:
        edge_id = identity.decode(errors="replace")
        if edge_id not in self._expected:
            return None
        edge = self._edges.get(edge_id)
        if edge is None:
            edge = self._edges[edge_id] = _Edge(lambda data: self._socket.send(identity, data))
            edge.send(self._status())
        return edge

    def _dispatch(self, edge: _Edge, message: wire.ToHub) -> None:
        match message:
            case wire.Open(call, request):
                edge.num_running += 1
                self._run(edge, call, partial(self._serve, edge, call, request), is_generation=True)
            case wire.Ask(call, question):
                self._run(edge, call, partial(self._answer, edge, call, question), is_generation=False)
            case wire.Close(call):
                if (task := edge.calls.get(call)) is not None:
                    task.cancel()
            case wire.Join():
                pass

    def _run(self, edge: _Edge, call: int, work: _Work, *, is_generation: bool) -> None:
        task = edge.calls[call] = self._spawn(self._told(edge, call, work))

        def ended(_: asyncio.Task[None]) -> None:
            del edge.calls[call]
            edge.num_running -= is_generation

        task.add_done_callback(ended)

    async def _told(self, edge: _Edge, call: int, work: _Work) -> None:
        """Do the work, and tell the edge process if it fails."""
        try:
            await work()
        except ServingError as exc:
            edge.send(wire.Failed(call, wire.wire_error(exc)))
        except Exception:
            logger.exception("call %d of an edge process failed", call)
            edge.send(wire.Failed(call, INTERNAL_ERROR))

    async def _serve(self, edge: _Edge, call: int, request: GenerateRequest) -> None:
        def put(delta: TokenDelta) -> bool:
            edge.put(call, delta)
            return True

        async with aclosing(self._backend.serve(request)) as deltas:
            await deltas.pour(put)

    async def _answer(self, edge: _Edge, call: int, question: wire.Question) -> None:
        answer = await self._answer_to(question)
        edge.send(wire.Answered(call, msgspec.Raw(wire.encode(answer))))

    async def _answer_to(self, question: wire.Question) -> wire.Answer:
        backend = self._backend
        match question:
            case wire.Explain(request):
                return await backend.explain(request)
            case wire.Decisions():
                return await backend.decisions()
            case wire.Pools():
                return await backend.pools()
            case wire.Check():
                return dict(await backend.check())
            case wire.Scrape():
                return self._scrape().decode()
            case wire.MakePin(pin):
                return await backend.cache.pin(pin)
            case wire.EndPin(pin_id, tenant):
                await backend.cache.unpin(pin_id, tenant)
                return None
            case wire.FetchPin(pin_id, prefetch, tenant):
                return await backend.cache.prefetch(pin_id, prefetch, tenant)
            case wire.ListPins(tenant, cache_scope):
                return await backend.cache.pins(tenant, cache_scope)

    def _status(self) -> wire.Status:
        backend = self._backend
        return wire.Status(backend.model, backend.max_model_len, self._readiness.reason, backend.ready)

    async def _tell_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            status = self._status()
            for edge in self._edges.values():
                edge.send(status)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _Edge:
    """One edge process and what it asked for."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.num_running = 0
        self._send = send
        self._deltas: list[tuple[int, TokenDelta]] = []

    def put(self, call: int, delta: TokenDelta) -> None:
        """Send a delta with all others of this turn of the event loop: a worker's step brings many at once."""
        if not self._deltas:
            asyncio.get_running_loop().call_soon(self._flush)
        self._deltas.append((call, delta))

    def send(self, message: wire.ToEdge) -> None:
        """Send behind what was put before."""
        self._flush()
        self._send(wire.encode(message))

    def _flush(self) -> None:
        if self._deltas:
            deltas, self._deltas = self._deltas, []
            self._send(wire.encode(wire.Deltas(deltas)))

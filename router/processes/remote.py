"""An edge process' side: a `Backend` that is somewhere else."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.constants import SocketType

from tandem.protocol.digest import CacheScope
from tandem.protocol.errors import NoWorker, ServingError, WorkerError
from tandem.protocol.messages import Prefetch
from tandem.router.backend import GenerateRequest, PinRequest, PinState, TokenDelta
from tandem.router.inbox import CallbackScheduler, Inbox
from tandem.router.processes import wire
from tandem.router.streams import InboxStream, Stream
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.idle_timeout import IdleClock, answered_in_time
from tandem.runtime.message_socket import MessageSocket

__all__ = ["RemoteBackend"]

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
ASK_TIMEOUT_S = 30.0  # the integrity check waits for every worker

T = TypeVar("T")
_Item = TokenDelta | ServingError


class RemoteBackend:
    """What `EdgeHub` serves, and the readiness and the pins of its process. Used from one event loop only.

    A hub that says nothing for `timeout_s` fails every call.
    """

    def __init__(
        self, endpoint: str, edge_id: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._status: wire.Status | None = None
        self._heard_s = clock()
        self._is_silent = False
        self._numbers = itertools.count()
        self._streams: dict[int, Inbox[_Item]] = {}
        self._turns = CallbackScheduler()
        self._questions: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = BackgroundTasks()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = self._context.socket(SocketType.DEALER)
        socket.identity = edge_id.encode()
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(endpoint)
        self._socket = MessageSocket(socket, lambda frames: self._on_message(frames[0]))

    async def start(self) -> None:
        """Join the hub. Raises `WorkerError` when it does not answer in time."""
        self._background.keep("watch of the deciding process", self._watch)
        self._send(wire.Join())
        if not await answered_in_time(self._joined, self._timeout_s):
            raise WorkerError(f"the deciding process did not answer within {self._timeout_s:g} s")

    async def close(self) -> None:
        """Fail what still runs and leave."""
        self._fail_all("the edge process is closing")
        await self._background.close()
        self._socket.close()
        self._context.term()

    # -- Backend --------------------------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """Name the model is served under."""
        return self._status.model if self._status else ""

    @property
    def max_model_len(self) -> int | None:
        """Shortest context of the workers; None while there is no worker."""
        return self._status.max_model_len if self._status else None

    @property
    def ready(self) -> bool:
        """Whether a request could be placed now."""
        return bool(self._status and self._status.can_serve and not self._is_silent)

    @property
    def cache(self) -> RemoteBackend:
        """What clients may say about the KV cache."""
        return self

    def serve(self, request: GenerateRequest) -> Stream[TokenDelta]:
        """Generate, ending with a delta that has a `finish_reason`. The stream raises a `ServingError`."""
        return _RemoteStream(self, request, Inbox(self._turns))

    async def explain(self, request: GenerateRequest) -> dict[str, Any]:
        """What would be decided for this request now, as JSON. Raises a `ServingError`."""
        return await self._ask(wire.Explain(request), dict[str, Any])

    async def decisions(self) -> list[dict[str, Any]]:
        """The latest decisions, newest first, as JSON."""
        return await self._ask(wire.Decisions(), list[dict[str, Any]])

    async def pools(self) -> dict[str, Any]:
        """State of the worker pools, as JSON."""
        return await self._ask(wire.Pools(), dict[str, Any])

    async def check(self) -> dict[str, str]:
        """What is wrong with, or held by, each worker that should be idle."""
        return await self._ask(wire.Check(), dict[str, str])

    # -- Pins -----------------------------------------------------------------------------------------------------

    async def pin(self, request: PinRequest) -> PinState:
        """Keep a prefix. Raises a `ServingError`."""
        return await self._ask(wire.MakePin(request), PinState)

    async def unpin(self, pin_id: str, tenant: str | None) -> None:
        """End a pin now. Raises `PinNotFound`."""
        await self._ask(wire.EndPin(pin_id, tenant), type(None))

    async def prefetch(self, pin_id: str, prefetch: Prefetch, tenant: str | None) -> PinState:
        """Bring a pin's blocks up now. Raises `PinNotFound`."""
        return await self._ask(wire.FetchPin(pin_id, prefetch, tenant), PinState)

    async def pins(self, tenant: str | None, cache_scope: CacheScope | None) -> list[PinState]:
        """The live pins, oldest first; of one scope, or (None) of all."""
        return await self._ask(wire.ListPins(tenant, cache_scope), list[PinState])

    # -- readiness and metrics of the hub's process ---------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """Why requests should not be sent here now; None when they should."""
        if self._status is None or self._is_silent:
            return "The deciding process does not answer."
        return self._status.unready

    async def scrape(self) -> bytes:
        """The metrics of the hub's process."""
        return (await self._ask(wire.Scrape(), str)).encode()

    # -- the line -------------------------------------------------------------------------------------------------

    def _begin(self) -> int:
        if self._is_silent:
            raise NoWorker("the deciding process does not answer")
        return next(self._numbers)

    async def _ask(self, question: wire.Question, answer_type: type[T]) -> T:
        call = self._begin()
        answer = self._questions[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(wire.Ask(call, question))
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return msgspec.msgpack.decode(await answer, type=answer_type)
        except TimeoutError:
            self._send(wire.Close(call))
            raise WorkerError(f"the deciding process did not answer within {ASK_TIMEOUT_S:g} s") from None
        finally:
            del self._questions[call]

    def _send(self, message: wire.ToHub) -> None:
        """Queue a message. Never blocks: the queue has no limit, and silence ends it."""
        self._socket.send(wire.encode(message))

    def _on_message(self, data: bytes) -> None:
        self._heard_s, self._is_silent = self._clock(), False
        try:
            self._dispatch(wire.decode_for_edge(data))
        except Exception:
            logger.exception("a message of the deciding process could not be handled")
            self._fail_all("a message of the deciding process could not be handled")  # it may have been anyone's

    def _dispatch(self, message: wire.ToEdge) -> None:
        match message:
            case wire.Deltas(items):
                for call, delta in items:
                    self._deliver(call, delta)
            case wire.Failed(call, error):
                self._fail(call, wire.error_of(error))
            case wire.Answered(call, answer):
                if (asked := self._questions.get(call)) is not None and not asked.done():
                    asked.set_result(answer)
            case wire.Status():
                self._status = message
                if not self._joined.done():
                    self._joined.set_result(None)

    def _deliver(self, call: int, item: _Item) -> None:
        # A client that left may still get tokens on their way.
        if (inbox := self._streams.get(call)) is not None:
            inbox.put(item)

    def _fail(self, call: int, error: ServingError) -> None:
        self._deliver(call, error)
        if (asked := self._questions.get(call)) is not None and not asked.done():
            asked.set_exception(error)

    def _fail_all(self, message: str) -> None:
        for call in [*self._streams, *self._questions]:
            self._fail(call, NoWorker(message))
            self._send(wire.Close(call))  # the hub may be there again

    async def _watch(self) -> None:
        """See whether the hub lives."""
        silence = IdleClock(self._timeout_s)
        while True:
            now = self._clock()
            silence.look(now, WATCH_INTERVAL_S)
            if silence.is_idle(self._heard_s, now) and not self._is_silent:
                idle_s = silence.idle_s(self._heard_s, now)
                logger.warning("the deciding process has been silent for %.1f s", idle_s)
                self._is_silent = True
                self._fail_all(f"the deciding process has been silent for {idle_s:.1f} s")
            await asyncio.sleep(WATCH_INTERVAL_S)


class _RemoteStream(InboxStream[_Item, TokenDelta]):
    """One request that the hub serves."""

    def __init__(self, backend: RemoteBackend, request: GenerateRequest, inbox: Inbox[_Item]) -> None:
        super().__init__(inbox)
        self._backend = backend
        self._request = request
        self._call: int | None = None
        self._is_over = False  # so the hub has said

    def close(self) -> None:
        """Expect nothing more; the hub is told unless it knows."""
        call, self._call = self._call, None
        if call is not None:
            del self._backend._streams[call]
            if not self._is_over:
                self._backend._send(wire.Close(call))

    async def _begin(self) -> None:
        backend = self._backend
        self._call = backend._begin()
        backend._streams[self._call] = self._inbox
        backend._send(wire.Open(self._call, self._request))

    def _make(self, items: list[_Item]) -> None:
        for item in items:
            if isinstance(item, ServingError):
                self._error, self._is_over = item, True
                return
            self._due.append(item)
            if item.finish_reason is not None:
                self._has_ended = self._is_over = True
                return

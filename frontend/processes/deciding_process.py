"""The deciding process's side: answers and serves the calls of frontend processes.

The parent of a frontend process announces it by `expect` and calls `drop` when it has ended, which cancels its calls.
Messages from other senders are ignored: a dead process's message, read late, must not start a call that nobody ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import LocalLimiter
from tandem.frontend.processes import wire
from tandem.frontend.processes.key_uses import KeyUses, LocalUses
from tandem.frontend.processes.message_link import MessageLink
from tandem.frontend.processes.methods import MethodTable, NotCallable
from tandem.protocol.errors import ServingError
from tandem.protocol.fault_boundary import error_of
from tandem.router.streams import Stream
from tandem.runtime import background
from tandem.runtime.background import BackgroundTasks

logger = logging.getLogger(__name__)

INTERNAL_ERROR = wire.WireError("ServingError", "Internal server error.", None, "internal_error", 0.0)


class LastingCall(ABC):
    """A call in progress. It sends results until it ends, fails, or is cancelled because nobody waits for it."""

    request_id: str  # for the log

    @abstractmethod
    async def run(self, put: Callable[[Any], None]) -> None:
        """Serve it; results go to `put`. It holds nothing before it runs and after its end."""

    def event(self, event: wire.Invocation[msgspec.Raw]) -> None:
        """Handle what its caller tells about it. Raises `NotCallable` for what it may not tell."""
        raise NotCallable(event.method)


class _StreamCall(LastingCall):
    """Sends the items of a stream."""

    def __init__(self, stream: Stream[Any], request_id: str) -> None:
        self.request_id = request_id
        self._stream = stream

    async def run(self, put: Callable[[Any], None]) -> None:
        def put_all(items: list[Any]) -> bool:
            for item in items:
                put(item)
            return True

        async with aclosing(self._stream) as stream:
            await stream.read_into(put_all)


class DecidingService(Protocol):
    """What a deciding process serves."""

    def methods_for(self, frontend_id: str) -> MethodTable:
        """What a frontend process may call.

        A method that returns a coroutine gets one answer, one that returns a `Stream` or a `LastingCall` gets results.
        """

    def joined(self, frontend_id: str) -> Sequence[Any]:
        """A frontend process has joined; returns its first state updates. It begins to serve with the first of them."""

    def left(self, frontend_id: str) -> None:
        """A frontend process that had joined has ended. Its calls are cancelled, and end later."""

    def status(self) -> Any:
        """The state update that is sent to all frontend processes at an interval."""


class DecidingProcess:
    """Its owner calls `start`, and `close` at the end. Used from one event loop only."""

    def __init__(
        self,
        service: DecidingService,
        path: str,
        api_keys: ApiKeys,
        *,
        status_interval_s: float = 0.25,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: the socket, in a folder that only this user may enter. Frontend processes are told the keys."""
        self._path = path
        self._api_keys = api_keys
        self.limiter = LocalLimiter(clock)
        api_keys.listen(self._keys_changed)
        self._service = service
        self._status_interval_s = status_interval_s
        self._expected: set[str] = set()
        self._frontends: dict[str, _Frontend] = {}  # the expected ones that have joined
        self._tasks: set[asyncio.Task[None]] = set()  # calls of all frontend processes, ended ones included
        self._background = BackgroundTasks()
        self._server: asyncio.Server | None = None
        self._links: set[MessageLink] = set()

    @property
    def num_running(self) -> int:
        """Lasting calls in progress."""
        return sum(len(frontend.calls) for frontend in self._frontends.values())

    async def start(self) -> None:
        """Begin to serve."""
        self._server = await asyncio.get_running_loop().create_unix_server(self._connection, self._path)
        self._background.keep("status for frontend processes", self._send_status)

    async def close(self) -> None:
        """Cancel everything and close all connections."""
        for frontend_id in list(self._frontends):
            self.drop(frontend_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._background.close(), *self._tasks, return_exceptions=True)
        for link in list(self._links):
            link.close()
        if self._server is not None:
            self._server.close()

    def expect(self, frontend_id: str) -> None:
        """Listen to a frontend process from now on. Its id is never used again after `drop`."""
        self._expected.add(frontend_id)

    def drop(self, frontend_id: str) -> None:
        """A frontend process has ended: cancel its calls, and ignore whatever else it sent."""
        self._expected.discard(frontend_id)
        frontend = self._frontends.pop(frontend_id, None)
        if frontend is not None:
            self._links.discard(frontend.link)
            frontend.close()
            self._service.left(frontend_id)

    def publish(self, state: Any) -> None:
        """Send a state update to all frontend processes, ahead of whatever is sent to them later."""
        self._send_to_all(wire.StateUpdate(state))

    def _send_to_all(self, message: wire.Keys | wire.StateUpdate[Any]) -> None:
        for frontend in self._frontends.values():
            frontend.out.send(message)

    def _keys_changed(self) -> None:
        self.limiter.keep({key.id for key in self._api_keys.all})
        self._send_to_all(wire.Keys(self._api_keys.all))

    def _connection(self) -> MessageLink:
        """A connection to a frontend process; at first it is not known to which one."""
        frontend: _Frontend | None = None

        def on_message(data: bytes) -> None:
            nonlocal frontend
            try:
                message = wire.decode_call(data)
            except msgspec.DecodeError as exc:  # the frontend process notices, ends, and is replaced
                logger.error("a frontend process sent something that is not a message: %s", exc)
                link.close()
                self._forget(link, frontend)
                return
            if frontend is not None:
                frontend.handle(message)
            elif isinstance(message, wire.Join) and self._may_join(message.frontend_id):
                frontend = self._join(message.frontend_id, link)

        def on_lost() -> None:
            self._forget(link, frontend)

        link = MessageLink(on_message, on_lost)
        self._links.add(link)
        return link

    def _forget(self, link: MessageLink, frontend: _Frontend | None) -> None:
        """A connection has ended."""
        self._links.discard(link)
        if frontend is not None and self._frontends.get(frontend.frontend_id) is frontend:
            self.drop(frontend.frontend_id)

    def _may_join(self, frontend_id: str) -> bool:
        """Whether a process of this name is expected and has not joined: a second one would take over its calls."""
        return frontend_id in self._expected and frontend_id not in self._frontends

    def _join(self, frontend_id: str, link: MessageLink) -> _Frontend:
        uses = LocalUses(self._api_keys, self.limiter)
        methods = self._service.methods_for(frontend_id)
        methods.add_immediate(KeyUses.begin)(uses.begin)
        methods.add_immediate(KeyUses.charge)(uses.charge)
        methods.add(KeyUses.end)(uses.end)
        frontend = self._frontends[frontend_id] = _Frontend(frontend_id, link, methods, uses, self._tasks)
        frontend.out.send(wire.Keys(self._api_keys.all))
        for state in self._service.joined(frontend_id):
            frontend.out.send(wire.StateUpdate(state))
        return frontend

    async def _send_status(self) -> None:
        while True:
            await asyncio.sleep(self._status_interval_s)
            self.publish(self._service.status())


class _Frontend:
    """One frontend process that has joined, and its calls."""

    def __init__(
        self,
        frontend_id: str,
        link: MessageLink,
        methods: MethodTable,
        uses: LocalUses,
        all_tasks: set[asyncio.Task[None]],
    ) -> None:
        self.frontend_id = frontend_id
        self.link = link
        self.calls: dict[int, LastingCall] = {}
        self.out: wire.Batch[Any] = wire.Batch(link.send, wire.Results, self._unsendable)
        self._methods = methods
        self._uses = uses
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._all_tasks = all_tasks

    def close(self) -> None:
        """It has ended: cancel its calls."""
        self.link.close()
        for task in list(self._tasks.values()):
            task.cancel()
        self._uses.close()

    def handle(self, message: Any) -> None:
        """Do what a message asks for."""
        match message:
            case wire.Call(number, called):
                self._guarded(number, self._call, called)
            case wire.Events(events):
                for number, event in events:
                    self._guarded(number, self._event, event)
            case wire.Cancel(number):
                if (task := self._tasks.get(number)) is not None:
                    task.cancel()
            case wire.Tell(called):
                method, implementation, _ = self._methods[called.method]
                method.bind(implementation, called.arguments)()
            case wire.Join():
                pass

    def _guarded(
        self,
        number: int,
        handle: Callable[[int, wire.Invocation[msgspec.Raw]], None],
        invoked: wire.Invocation[msgspec.Raw],
    ) -> None:
        """Do what is asked for a call. If that raises, only this call fails: events of others may follow."""
        if (error := error_of(handle, number, invoked)) is not None:
            self._failed(number, error)

    def _call(self, number: int, called: wire.Invocation[msgspec.Raw]) -> None:
        try:
            method, implementation, is_immediate = self._methods[called.method]
            call = method.bind(implementation, called.arguments)
        except msgspec.DecodeError as exc:
            logger.error("a frontend process sent something that is not a message: %s", exc)
            self._fail(number, INTERNAL_ERROR)
            return
        if is_immediate:
            self._call_now(number, call)
        else:
            self._start(number, partial(self._answer, number, call))

    def _call_now(self, number: int, call: partial[Any]) -> None:
        outcome = call()
        if isinstance(outcome, Stream):
            outcome = _StreamCall(outcome, call.args[0].request_id)
        if isinstance(outcome, LastingCall):
            self.calls[number] = outcome
            self._start(number, partial(outcome.run, partial(self.out.add, number)))
        else:
            self._answered(number, outcome)

    async def _answer(self, number: int, call: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._answered(number, await call())

    def _answered(self, number: int, answer: Any) -> None:
        self.out.send(wire.Answered(number, msgspec.Raw(wire.encode(answer))))

    def _event(self, number: int, event: wire.Invocation[msgspec.Raw]) -> None:
        if (call := self.calls.get(number)) is not None:  # otherwise it has ended here
            call.event(event)

    def _start(self, number: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = self._tasks[number] = asyncio.get_running_loop().create_task(work())
        self._all_tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            self._all_tasks.discard(task)
            del self._tasks[number]
            if (error := background.task_error(task)) is not None:
                self._failed(number, error)
            self.calls.pop(number, None)

        task.add_done_callback(ended)

    def _failed(self, number: int, error: Exception) -> None:
        """A call has failed: end it, and tell the frontend process, which waits for an answer."""
        if isinstance(error, ServingError):
            self._fail(number, wire.wire_error(error))
        else:
            logger.error("%s failed", self._name(number), exc_info=error)
            self._fail(number, INTERNAL_ERROR)

    def _fail(self, number: int, error: wire.WireError) -> None:
        """End a call with an error."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()
        self.out.send(wire.Failed(number, error))

    def _unsendable(self, number: int, error: Exception) -> None:
        logger.error("a result of %s cannot be sent", self._name(number), exc_info=error)
        self._fail(number, INTERNAL_ERROR)

    def _name(self, number: int) -> str:
        """The name of a call in the log."""
        call = self.calls.get(number)
        return f"question {number} of {self.frontend_id}" if call is None else f"request {call.request_id}"

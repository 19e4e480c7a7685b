"""A frontend process's connection to the deciding process: calls, state updates, and a watch for its silence."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec

from tandem.frontend.keys.api_key import ApiKey
from tandem.frontend.processes import wire
from tandem.frontend.processes.message_link import MessageLink
from tandem.frontend.processes.methods import invocation, method_of
from tandem.protocol.errors import NoWorker, ServingError, WorkerError
from tandem.protocol.fault_boundary import error_of, noted_on_error
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.idle_timeout import IdleClock, answered_in_time

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 30.0  # long, because the integrity check waits for every worker

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """How a frontend process joins the deciding process."""

    endpoint: str  # the socket
    frontend_id: str
    on_lost: Callable[[], object]  # called when the connection has ended; there will be no other
    timeout_s: float  # a deciding process that sends nothing for longer fails every call
    needs_key: bool = False  # whether clients need an API key; the deciding process says which ones there are
    watch_interval_s: float = 0.5  # between two looks for silence
    clock: Callable[[], float] = time.monotonic


class _OpenCall(NamedTuple):
    """A call that has not ended."""

    receive: Callable[[Any], object]
    request_id: str  # for the log


class DecidingClient:
    """A frontend process's connection. Used from one event loop only."""

    def __init__(
        self,
        settings: JoinSettings,
        *,
        results: Any,
        states: Any,
        on_state: Callable[[Any], None],
        on_keys: Callable[[list[ApiKey]], None],
    ) -> None:
        """`results` is the type of what lasting calls get, `states` that of state updates, which `on_state` gets."""
        self.is_silent = False
        self._settings = settings
        self._decode = wire.decoder_of(results=results, states=states)
        self._on_state = on_state
        self._on_keys = on_keys
        self._heard_s = settings.clock()
        self._numbers = itertools.count()
        self._calls: dict[int, _OpenCall] = {}
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = BackgroundTasks()
        self._link = MessageLink(lambda data: self._on_message(data), self._on_lost)
        self._out: wire.Batch[Any] = wire.Batch(self._link.send, wire.Events, self._unsendable)

    @property
    def num_open(self) -> int:
        """Calls in progress."""
        return len(self._calls)

    async def start(self) -> None:
        """Join. Raises `WorkerError` when it does not answer in time."""
        self._background.keep("watch of the deciding process", self._watch)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._link, self._settings.endpoint)
        except OSError as exc:
            raise WorkerError(f"the deciding process cannot be reached: {exc}") from exc
        self._out.send(wire.Join(self._settings.frontend_id))
        if not await answered_in_time(self._joined, self._settings.timeout_s):
            raise WorkerError(f"the deciding process did not answer within {self._settings.timeout_s:g} s")

    async def close(self) -> None:
        """Fail what still runs and leave."""
        self._fail_all("the router is shutting down; send the request again")
        await self._background.close()
        self._link.close()

    def open(self, receive: Callable[[Any], object], method: Callable[[Any, Any], object], request: Any) -> int:
        """Begin a call that lasts: `receive` gets its results, or finally a `ServingError`. Returns its number.

        The caller ends it by `close_call`. Raises `NoWorker` when the deciding process is silent.
        """
        return self._call(receive, invocation(method, request), request.request_id)

    def is_open(self, number: int) -> bool:
        """Whether this call is still served: the deciding process has not ended it, and is not silent."""
        return number in self._calls and not self.is_silent

    def event(
        self, number: int, method: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Tell the deciding process what happened to a call."""
        self._out.add(number, invocation(method, *args, **kwargs))

    def close_call(self, number: int, *, is_over: bool = False) -> None:
        """Expect nothing more from a call, and end it in the deciding process. `is_over`: its last result has come."""
        if self._calls.pop(number, None) is not None and not is_over:
            self._out.send(wire.Cancel(number))

    async def ask(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The answer. Raises a `ServingError`: that of the method, or one that says that there is no answer."""
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        number = self._call(partial(_settle, answer), invocation(method, *args, **kwargs))
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                result: T = method_of(method).decode_result(await answer)
                return result
        except TimeoutError:
            self.close_call(number)
            raise WorkerError(f"the deciding process did not answer within {ASK_TIMEOUT_S:g} s") from None
        except ServingError:  # if the deciding process was silent, it may still work on the call
            self.close_call(number)
            raise
        finally:
            self._calls.pop(number, None)

    def tell(self, method: Callable[Concatenate[Any, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method that has no answer."""
        self._out.send(wire.Tell(invocation(method, *args, **kwargs)))

    def _call(
        self, receive: Callable[[Any], object], called: wire.Invocation[msgspec.Struct], request_id: str = ""
    ) -> int:
        if self.is_silent:
            raise NoWorker("the deciding process does not answer")
        number = next(self._numbers)
        self._out.send(wire.Call(number, called))
        self._calls[number] = _OpenCall(receive, request_id)
        return number

    def _on_message(self, data: bytes) -> None:
        self._heard_s, self.is_silent = self._settings.clock(), False
        with noted_on_error(self._fail_unhandled):  # `MessageLink` logs the error and goes on
            self._dispatch(data)

    def _fail_unhandled(self, _: BaseException) -> None:
        """A message could not be handled: the call it was for would wait forever."""
        self._fail_all("a message of the deciding process could not be handled")

    def _on_lost(self) -> None:
        """The deciding process has ended, or has closed the connection: nothing more can be decided."""
        self.is_silent = True
        self._fail_all("the deciding process has closed the connection")
        self._settings.on_lost()

    def _dispatch(self, data: bytes) -> None:
        match self._decode(data):
            case wire.Results(items):
                for number, item in items:
                    if (call := self._calls.get(number)) is not None:  # otherwise its client has left
                        _pass_on(call, item)
            case wire.Answered(number, answer):
                if (call := self._calls.pop(number, None)) is not None:
                    call.receive(answer)
            case wire.Failed(number, error):
                if (call := self._calls.get(number)) is not None:
                    call.receive(wire.error_of(error))
                    self._calls.pop(number, None)  # it is over in the deciding process
            case wire.Keys(keys):
                self._on_keys(keys)
            case wire.StateUpdate(state):
                self._on_state(state)
                if not self._joined.done():
                    self._joined.set_result(None)

    def _unsendable(self, number: int, error: Exception) -> None:
        call = self._calls.get(number)
        name = call.request_id if call is not None else f"that was call {number}"
        logger.error("a note about request %s cannot be sent", name, exc_info=error)
        if call is not None:
            call.receive(WorkerError("a message to the deciding process could not be sent"))

    def _fail_all(self, message: str) -> None:
        """Fail everything that waits. Owners end their calls; the deciding process may answer again."""
        for call in list(self._calls.values()):
            call.receive(NoWorker(message))

    async def _watch(self) -> None:
        """Notice that the deciding process is silent."""
        silence, interval_s = IdleClock(self._settings.timeout_s), self._settings.watch_interval_s
        while True:
            now = self._settings.clock()
            silence.check(now, interval_s)
            if silence.is_idle(self._heard_s, now) and not self.is_silent:
                idle_s = silence.idle_s(self._heard_s, now)
                logger.warning("the deciding process has been silent for %.1f s", idle_s)
                self.is_silent = True
                self._fail_all(f"the deciding process has been silent for {idle_s:.1f} s")
            await asyncio.sleep(interval_s)


def _settle(answer: asyncio.Future[msgspec.Raw], result: msgspec.Raw | ServingError) -> None:
    if answer.done():
        return
    if isinstance(result, ServingError):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def _pass_on(call: _OpenCall, item: Any) -> None:
    """Give a call its result. If that raises, only this call fails."""
    if (error := error_of(call.receive, item)) is not None:
        logger.error("an item of request %s could not be handled", call.request_id, exc_info=error)
        call.receive(WorkerError("a message of the deciding process could not be handled"))

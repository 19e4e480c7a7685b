"""An edge process's connection to the hub: calls, questions, news, and a watch for the hub's silence."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import msgspec

from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.processes import wire
from tandem.frontend.processes.message_link import MessageLink
from tandem.frontend.processes.remote_limiter import RemoteLimiter
from tandem.protocol.errors import NoWorker, WorkerError
from tandem.protocol.fault_boundary import error_of
from tandem.runtime.background import BackgroundTasks
from tandem.runtime.idle_timeout import IdleClock, answered_in_time

__all__ = ["HubClient"]

logger = logging.getLogger(__name__)

WATCH_INTERVAL_S = 0.5
ASK_TIMEOUT_S = 30.0  # long, because the integrity check waits for every worker

T = TypeVar("T")


class _Call(NamedTuple):
    """A request that lasts."""

    receive: Callable[[Any], None]
    request_id: str  # for the log


class HubClient:
    """Used from one event loop only. A hub that sends nothing for `timeout_s` fails every call and every question."""

    def __init__(
        self,
        path: str,
        edge_id: str,
        wire_format: wire.WireFormat,
        on_news: Callable[[Any], None],
        *,
        on_lost: Callable[[], object],
        timeout_s: float,
        needs_key: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_lost` is called when the connection has ended; there will be no other. `path` is the hub's socket.

        `needs_key`: clients need an API key. The hub says which ones there are.
        """
        limiter = RemoteLimiter(self._begin, self._ask_as, lambda message: self._out.send(message))
        self.api_keys = ApiKeys(is_required=needs_key, limiter=limiter)
        self.is_silent = False
        self._path = path
        self._edge_id = edge_id
        self._decode = wire_format.decode_for_edge
        self._on_news = on_news
        self._tell_lost = on_lost
        self._timeout_s = timeout_s
        self._clock = clock
        self._heard_s = clock()
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._questions: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = BackgroundTasks()
        self._link = MessageLink(lambda data: self._on_message(data), self._on_lost)
        self._out: wire.Batch[Any] = wire.Batch(self._link.send, wire.Notes, self._unsendable)

    @property
    def num_open(self) -> int:
        """Calls and questions in progress."""
        return len(self._calls) + len(self._questions)

    async def start(self) -> None:
        """Join the hub. Raises `WorkerError` when it does not answer in time."""
        self._background.keep("watch of the deciding process", self._watch)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: self._link, self._path)
        except OSError as exc:
            raise WorkerError(f"the deciding process cannot be reached: {exc}") from exc
        self._out.send(wire.Join(self._edge_id))
        if not await answered_in_time(self._joined, self._timeout_s):
            raise WorkerError(f"the deciding process did not answer within {self._timeout_s:g} s")

    async def close(self) -> None:
        """Fail what still runs and leave."""
        self._fail_all("the router is shutting down; send the request again")
        await self._background.close()
        self._link.close()

    def open(self, request: Any, receive: Callable[[Any], None]) -> int:
        """Begin a call: `receive` gets its items, or finally a `ServingError`. Returns the call's number.

        The caller ends it by `close_call`. Raises `NoWorker` when the hub is silent.
        """
        number = self._begin()
        self._out.send(wire.Open(number, request))
        self._calls[number] = _Call(receive, request.request_id)
        return number

    def is_open(self, number: int) -> bool:
        """Whether the hub still serves this call: it has not ended the call, and is not silent."""
        return number in self._calls and not self.is_silent

    def note(self, number: int, note: Any) -> None:
        """Tell the hub what happened to a call."""
        self._out.add(number, note)

    def close_call(self, number: int, *, is_over: bool = False) -> None:
        """Expect nothing more from a call, and end it in the hub. `is_over`: its last item has come."""
        if self._calls.pop(number, None) is not None and not is_over:
            self._out.send(wire.Close(number))

    async def ask(self, question: Any, answer_type: type[T]) -> T:
        """The hub's answer. Raises a `ServingError`: the hub's own, or one that says that there is no answer."""
        number = self._begin()
        return msgspec.msgpack.decode(await self._ask_as(number, wire.Ask(number, question)), type=answer_type)

    async def _ask_as(self, number: int, message: Any) -> msgspec.Raw:
        """The answer to a message with this number."""
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._out.send(message)
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await answer
        except TimeoutError:
            self._out.send(wire.Close(number))
            raise WorkerError(f"the deciding process did not answer within {ASK_TIMEOUT_S:g} s") from None
        finally:
            del self._questions[number]

    def _begin(self) -> int:
        if self.is_silent:
            raise NoWorker("the deciding process does not answer")
        return next(self._numbers)

    def _on_message(self, data: bytes) -> None:
        self._heard_s, self.is_silent = self._clock(), False
        if (error := error_of(self._dispatch, data)) is not None:  # the call it was for would wait for ever
            logger.error("a message of the deciding process could not be handled", exc_info=error)
            self._fail_all("a message of the deciding process could not be handled")

    def _on_lost(self) -> None:
        """The hub has ended, or has closed the connection: nothing can be decided any more."""
        self.is_silent = True
        self._fail_all("the deciding process has closed the connection")
        self._tell_lost()

    def _dispatch(self, data: bytes) -> None:
        match self._decode(data):
            case wire.Items(items):
                for number, item in items:
                    if (call := self._calls.get(number)) is not None:  # otherwise its client has left
                        _pass_on(call, item)
            case wire.Failed(number, error):
                if (call := self._calls.get(number)) is not None:
                    call.receive(wire.error_of(error))
                    self._calls.pop(number, None)  # it is over in the hub
                elif (asked := self._questions.get(number)) is not None and not asked.done():
                    asked.set_exception(wire.error_of(error))
            case wire.Answered(number, answer):
                if (asked := self._questions.get(number)) is not None and not asked.done():
                    asked.set_result(answer)
            case wire.Keys(keys):
                self.api_keys.replace(keys)
            case wire.News(news):
                self._on_news(news)
                if not self._joined.done():
                    self._joined.set_result(None)

    def _unsendable(self, number: int, error: Exception) -> None:
        call = self._calls.get(number)
        name = call.request_id if call is not None else f"that was call {number}"
        logger.error("a note about request %s cannot be sent", name, exc_info=error)
        if call is not None:
            call.receive(WorkerError("a message to the deciding process could not be sent"))

    def _fail_all(self, message: str) -> None:
        """Fail everything that waits for the hub. Owners end their calls; the hub may answer again."""
        for call in list(self._calls.values()):
            call.receive(NoWorker(message))
        for number, asked in self._questions.items():
            if not asked.done():
                asked.set_exception(NoWorker(message))
            self._out.send(wire.Close(number))

    async def _watch(self) -> None:
        """Notice that the hub is silent."""
        silence = IdleClock(self._timeout_s)
        while True:
            now = self._clock()
            silence.check(now, WATCH_INTERVAL_S)
            if silence.is_idle(self._heard_s, now) and not self.is_silent:
                idle_s = silence.idle_s(self._heard_s, now)
                logger.warning("the deciding process has been silent for %.1f s", idle_s)
                self.is_silent = True
                self._fail_all(f"the deciding process has been silent for {idle_s:.1f} s")
            await asyncio.sleep(WATCH_INTERVAL_S)


def _pass_on(call: _Call, item: Any) -> None:
    """Give a call its item. If that raises, only this call fails."""
    if (error := error_of(call.receive, item)) is not None:
        logger.error("an item of request %s could not be handled", call.request_id, exc_info=error)
        call.receive(WorkerError("a message of the deciding process could not be handled"))

"""The deciding process's side: serves the calls and answers the questions of edge processes.

The parent of an edge process announces it by `expect` and calls `drop` when it has ended, which cancels its calls.
Messages from other senders are ignored: a dead process's message, read late, must not start a call that nobody ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from tandem.frontend.keys.api_key import ApiKey, InvalidApiKey
from tandem.frontend.keys.api_keys import ApiKeys
from tandem.frontend.keys.limiter import LocalLimiter, LocalUse
from tandem.frontend.processes import wire
from tandem.frontend.processes.message_link import MessageLink
from tandem.protocol.errors import ServingError
from tandem.protocol.fault_boundary import async_error_of, error_of
from tandem.runtime.background import BackgroundTasks

__all__ = ["EdgeHub", "HubCall", "HubService"]

logger = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.25
INTERNAL_ERROR = wire.WireError("ServingError", "Internal server error.", None, "internal_error", 0.0)


class HubCall(Protocol):
    """One call in progress."""

    @property
    def request_id(self) -> str:
        """Its id in the log."""

    async def run(self) -> None:
        """Serve it. It is cancelled when nobody waits any more. It holds nothing before it runs and after its end."""

    def note(self, note: Any) -> None:
        """Handle what the edge process reports about it."""


class HubService(Protocol):
    """What a hub serves. Its `wire_format` has the types of requests, notes, items, questions and news."""

    @property
    def wire_format(self) -> wire.WireFormat:
        """The types of its messages."""

    def open(self, edge_id: str, request: Any, put: Callable[[Any], None]) -> HubCall:
        """A new call for an edge process. Its items go to `put`. It holds nothing until it runs."""

    async def answer(self, question: Any) -> Any:
        """The answer to a question. Raises a `ServingError`."""

    def joined(self, edge_id: str) -> Sequence[Any]:
        """An edge process has joined; returns the news for it. It begins to serve with the first of them."""

    def left(self, edge_id: str) -> None:
        """An edge process that had joined has ended. Its calls are cancelled, and end later."""

    def status(self) -> Any:
        """News for all edge processes, sent at an interval."""


class EdgeHub:
    """Its owner calls `start`, and `close` at the end. Used from one event loop only."""

    def __init__(
        self,
        service: HubService,
        path: str,
        api_keys: ApiKeys,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path`: the socket, in a folder that only this user may enter. Edge processes get the keys, then changes."""
        self._path = path
        self._api_keys = api_keys
        self.limiter = LocalLimiter(clock)
        api_keys.listen(self._keys_changed)
        self._service = service
        self._decode = service.wire_format.decode_for_hub
        self._expected: set[str] = set()
        self._edges: dict[str, _Edge] = {}  # the expected ones that have joined
        self._tasks: set[asyncio.Task[None]] = set()  # calls and questions; `_guarded` handles their errors
        self._background = BackgroundTasks()
        self._server: asyncio.Server | None = None
        self._links: set[MessageLink] = set()

    @property
    def num_running(self) -> int:
        """Calls in progress."""
        return sum(len(edge.calls) for edge in self._edges.values())

    async def start(self) -> None:
        """Begin to serve."""
        self._server = await asyncio.get_running_loop().create_unix_server(self._connection, self._path)
        self._background.keep("status for edge processes", self._send_status)

    async def close(self) -> None:
        """Cancel everything and close all connections."""
        for edge_id in list(self._edges):
            self.drop(edge_id)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(self._background.close(), *self._tasks, return_exceptions=True)
        for link in list(self._links):
            link.close()
        if self._server is not None:
            self._server.close()

    def expect(self, edge_id: str) -> None:
        """Listen to an edge process from now on. Its id is never used again after `drop`."""
        self._expected.add(edge_id)

    def drop(self, edge_id: str) -> None:
        """An edge process has ended: cancel its calls and questions, and ignore whatever else it sent."""
        self._expected.discard(edge_id)
        edge = self._edges.pop(edge_id, None)
        if edge is None:
            return
        edge.link.close()
        self._links.discard(edge.link)
        for task in list(edge.tasks.values()):
            task.cancel()
        for use in edge.uses.values():
            use.end(0, 0)
        self._service.left(edge_id)

    def publish(self, news: Any) -> None:
        """Send news to all edge processes, ahead of whatever is sent to them later."""
        self._send_to_all(wire.News(news))

    def _send_to_all(self, message: wire.Keys | wire.News[Any]) -> None:
        for edge in self._edges.values():
            edge.out.send(message)

    def _keys_changed(self) -> None:
        self.limiter.keep({key.id for key in self._api_keys.all})
        self._send_to_all(self._keys())

    def _keys(self) -> wire.Keys:
        return wire.Keys(self._api_keys.all)

    def _connection(self) -> MessageLink:
        """A connection to an edge process; at first it is not known to which one."""
        edge: _Edge | None = None

        def on_message(data: bytes) -> None:
            nonlocal edge
            try:
                message = self._decode(data)
            except msgspec.DecodeError as exc:
                logger.error("an edge process sent something that is no message: %s", exc)
                self._refuse(data, edge, link)
                return
            if edge is not None:
                self._dispatch(edge, message)
            elif isinstance(message, wire.Join) and self._may_join(message.edge_id):
                edge = self._join(message.edge_id, link)

        def on_lost() -> None:
            self._forget(link, edge)

        link = MessageLink(on_message, on_lost)
        self._links.add(link)
        return link

    def _refuse(self, data: bytes, edge: _Edge | None, link: MessageLink) -> None:
        """Fail the calls that an undecodable message is about; end the connection if they cannot be known."""
        if edge is not None and (calls := wire.calls_in(data)):
            for number in calls:
                edge.fail(number, INTERNAL_ERROR)
        else:  # the edge process notices, ends, and is replaced
            link.close()
            self._forget(link, edge)

    def _forget(self, link: MessageLink, edge: _Edge | None) -> None:
        """A connection has ended."""
        self._links.discard(link)
        if edge is not None and self._edges.get(edge.edge_id) is edge:
            self.drop(edge.edge_id)

    def _may_join(self, edge_id: str) -> bool:
        """Whether a process of this name is expected and has not joined: a second one would take over its calls."""
        return edge_id in self._expected and edge_id not in self._edges

    def _join(self, edge_id: str, link: MessageLink) -> _Edge:
        edge = self._edges[edge_id] = _Edge(edge_id, link)
        edge.out.send(self._keys())
        for news in self._service.joined(edge_id):
            edge.out.send(wire.News(news))
        return edge

    def _dispatch(self, edge: _Edge, message: Any) -> None:
        match message:
            case wire.Open(number, request):
                self._run(edge, number, self._serve(edge, number, request))
            case wire.Notes(items):
                for number, note in items:
                    self._note(edge, number, note)
            case wire.Ask(number, question):
                self._run(edge, number, self._answer(edge, number, question))
            case wire.Close(number):
                if (task := edge.tasks.get(number)) is not None:
                    task.cancel()
            case wire.BeginUse() | wire.ChargeUse():
                self._limit(edge, message)
            case wire.EndUse(use, num_prompt_tokens, num_output_tokens):
                if (ended := edge.uses.pop(use, None)) is not None:
                    ended.end(num_prompt_tokens, num_output_tokens)
            case wire.Join():
                pass

    def _limit(self, edge: _Edge, message: wire.BeginUse | wire.ChargeUse) -> None:
        """Count a request against the limits of its API key."""
        try:
            match message:
                case wire.BeginUse(number, key_id):
                    edge.uses[number] = self.limiter.begin_now(self._key(key_id))
                case wire.ChargeUse(_, use, num_prompt_tokens, num_answers, max_tokens):
                    edge.uses[use].charge_now(num_prompt_tokens, num_answers, max_tokens)
        except ServingError as exc:
            edge.out.send(wire.Failed(message.call, wire.wire_error(exc)))
        else:
            edge.out.send(wire.Answered(message.call, msgspec.Raw(wire.encode(None))))

    def _key(self, key_id: str) -> ApiKey:
        key = self._api_keys.get(key_id)
        if key is None:  # the edge process does not know yet that the key is gone
            raise InvalidApiKey(f"The API key {key_id} is removed.")
        return key

    def _note(self, edge: _Edge, number: int, note: Any) -> None:
        if (call := edge.calls.get(number)) is None:
            return  # it has ended here
        if (error := error_of(call.note, note)) is not None:  # notes about other calls must still be handled
            logger.error("a note about request %s could not be handled", call.request_id, exc_info=error)
            edge.fail(number, INTERNAL_ERROR)

    def _run(self, edge: _Edge, number: int, work: Coroutine[None, None, None]) -> None:
        task = edge.tasks[number] = asyncio.get_running_loop().create_task(_guarded(edge, number, work))
        self._tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            work.close()  # a task that was cancelled before it began has not even begun this
            self._tasks.discard(task)
            del edge.tasks[number]
            edge.calls.pop(number, None)

        task.add_done_callback(ended)

    async def _serve(self, edge: _Edge, number: int, request: Any) -> None:
        call = edge.calls[number] = self._service.open(edge.edge_id, request, partial(edge.out.add, number))
        await call.run()

    async def _answer(self, edge: _Edge, number: int, question: Any) -> None:
        answer = await self._service.answer(question)
        edge.out.send(wire.Answered(number, msgspec.Raw(wire.encode(answer))))

    async def _send_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self.publish(self._service.status())


class _Edge:
    """One edge process and what it asked for."""

    def __init__(self, edge_id: str, link: MessageLink) -> None:
        self.edge_id = edge_id
        self.link = link
        self.calls: dict[int, HubCall] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}  # calls and questions
        self.uses: dict[int, LocalUse] = {}  # requests whose API keys have limits
        self.out: wire.Batch[Any] = wire.Batch(link.send, wire.Items, self._unsendable)

    def name(self, number: int) -> str:
        """The name of a call or a question in the log."""
        call = self.calls.get(number)
        return f"question {number} of {self.edge_id}" if call is None else f"request {call.request_id}"

    def fail(self, number: int, error: wire.WireError) -> None:
        """End a call or a question with an error."""
        if (task := self.tasks.get(number)) is not None:
            task.cancel()
        self.out.send(wire.Failed(number, error))

    def _unsendable(self, number: int, error: Exception) -> None:
        logger.error("an item of %s cannot be sent", self.name(number), exc_info=error)
        self.fail(number, INTERNAL_ERROR)


async def _guarded(edge: _Edge, number: int, work: Coroutine[None, None, None]) -> None:
    """Do the work, and tell the edge process if it fails."""
    error = await async_error_of(work)
    if isinstance(error, ServingError):
        edge.out.send(wire.Failed(number, wire.wire_error(error)))
    elif error is not None:  # the hub goes on, and the edge process waits for an answer
        logger.error("%s failed", edge.name(number), exc_info=error)
        edge.out.send(wire.Failed(number, INTERNAL_ERROR))

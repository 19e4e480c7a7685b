"""From an engine's stream to the client: events are forwarded as they came, and read only as far as needed.

All events of one read are forwarded in one write, in the callback that received them: waking a task for each would cost
as much as everything else that is done with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tandem.frontend.http.response_writer import ResponseWriter
from tandem.frontend.relay.answers import error_text
from tandem.frontend.relay.connections import engine_errors
from tandem.frontend.relay.observer import AttemptObserver
from tandem.frontend.relay.sse import (
    PORTION_BYTES,
    EventFormat,
    EventSplitter,
    SseEvent,
    end_of_event,
    first_event,
    split_events,
)
from tandem.router.engines.bounded_json import NotJson, Outline
from tandem.router.engines.errors import EngineFailed, EngineTimeout
from tandem.router.engines.upstream import QUICK_BYTES, Reply
from tandem.runtime.idle_timeout import IdleTimeout

Rewrite = Callable[[bytes], tuple[bytes, int, int, int]]

MAX_PARSED_AT_ONCE = 64  # events of a stream that are parsed as they arrive, beside those that are only text


class StreamRelay:
    """One stream on its way to the client."""

    def __init__(
        self,
        engine: str,
        reply: Reply,
        observer: AttemptObserver,
        events: EventFormat,
        *,
        shows_usage: bool,
        prefill_usage: dict[str, Any] | None = None,
        rewrite: Rewrite | None = None,
    ) -> None:
        """`shows_usage`: the client asked for the usage event. `prefill_usage` is that of a pair's prefill engine.

        `rewrite` turns whole events into those that are read and forwarded. It tells the number of pieces of the
        answer if they are nothing else, or else 0; the number of events that it had to parse; and of how many bytes
        these were: it leaves events that would take long to a later call.
        """
        self.is_done = False  # the last event has come
        self._events = events
        self._engine = engine
        self._reply = reply
        self._observer = observer
        self._shows_usage = shows_usage
        self._prefill_usage = prefill_usage
        self._rewrite = rewrite
        self._splitter = EventSplitter()
        self._pending = b""  # events that came before `run`, or that wait for their turn
        self._last = b""  # events that came with the end
        self._failure: EngineFailed | None = None  # raised once the events before it are forwarded
        self._has_token = False
        self._num_parsed = 0
        self._timeout_s = math.inf
        self._last_event_s = 0.0

    async def read_first_event(self) -> SseEvent:
        """The first event that is more than a comment. Call it before `run`; comments before it are dropped.

        It is looked for in the callback that brings the bytes: work of this task would be in no time slice.
        """
        first: SseEvent | None = None

        def look(parts: list[bytes]) -> bool:
            nonlocal first
            self._pending = self._complete_events(b"".join(parts))
            first = first_event(self._pending, self._events)
            if first is None:
                self._note_parsed(self._pending.count(b"\n\n"))
            return first is None

        with engine_errors(self._engine):
            await self._reply.read_into(look)
        if first is None:
            raise self._ended_early()
        return first

    async def run(self, writer: ResponseWriter, timeout_s: float, abort: Callable[[str], None]) -> bytes:
        """Forward the stream; returns its last events, which are not sent yet.

        Calls `abort` with a reason when the engine is silent for too long. Raises `EngineFailed`, and what `writer`
        raises.
        """
        self._timeout_s, self._last_event_s = timeout_s, time.monotonic()
        idle = IdleTimeout(timeout_s, lambda: abort(f"sent nothing within request_timeout_s={timeout_s:g}"))
        try:
            if len(self._pending) > QUICK_BYTES:
                self._reply.call_again()
            else:
                self._forward(writer, b"")
            while not self.is_done:
                await self._drain(writer)
                self._last_event_s = time.monotonic()  # the engine is not to blame for the client's slowness
                if self._failure is not None:
                    raise self._failure
                with engine_errors(self._engine):
                    has_ended = await self._reply.read_into(partial(self._on_parts, writer), idle)
                if has_ended:
                    raise self._ended_early()
            return self._last
        finally:
            idle.close()

    def end_with(self, events: bytes) -> bytes:
        """End the stream with these events, because the engine's own last ones are lost; returns what is shown."""
        self._rewrite, self._failure = None, None
        return self.visible(events)

    def visible(self, events: bytes) -> bytes:
        """The part of these events that the client gets. The observer gets to know of all of them.

        Events that would take long are put off. Comments that keep a connection alive go no further.
        """
        num_pieces = end = 0
        if self._rewrite is not None:
            given = events
            events, num_pieces, num_parsed, num_bytes = self._rewrite(given)
            end = len(events)
            if num_parsed:
                self._note_parsed(num_parsed)
                self._put_off(given[num_bytes:])
        if not num_pieces:
            num_pieces, end = self._events.leading_pieces(events)
        if num_tokens := self._num_tokens(num_pieces, events[:end]):
            self._observer.saw_tokens(num_tokens)
        if end == len(events):
            return events
        shown = [events[:end]]
        portion_end = len(events) if self._rewrite is not None else end_of_event(events, end + PORTION_BYTES)
        self._put_off(events[portion_end:])
        others = split_events(events[end:portion_end])
        self._note_parsed(len(others))
        for raw in others:
            if b"data:" not in raw:  # a comment, as engines send them while they compute
                continue
            if self._events.leading_pieces(raw)[0]:  # NOTE: not parsed; Python's servers send NaN, which is not JSON
                if self._num_tokens(1, raw):
                    self._observer.saw_tokens(1)
                shown.append(raw)
                continue
            event = self._events.parse(raw)
            if event.error is not None:
                message = f"failed in the middle: {error_text(event.error)}"
                self._failure = EngineFailed(self._engine, message)
                break
            try:
                visible = self._visible_event(event) if event.has_data else None
            except NotJson as exc:
                self._failure = EngineFailed(self._engine, f"sent an event that cannot be sent on: {exc}")
                break
            if visible is not None:
                shown.append(visible.raw)
            if event.is_done:
                break
        return b"".join(shown)

    def _num_tokens(self, num_pieces: int, events: bytes) -> int:
        """The number of pieces without those that only open an answer: some engines send these before they compute."""
        if self._has_token or not num_pieces:
            return num_pieces
        num_openings = 0
        for raw in split_events(events):
            if not self._events.parse(raw).is_opening:
                self._has_token = True
                break
            num_openings += 1
        self._note_parsed(num_openings)
        return num_pieces - num_openings

    def _note_parsed(self, num_events: int) -> None:
        """A stream of text needs no more than a few events parsed. One that needs many takes turns with the others."""
        self._num_parsed += num_events
        self._reply.is_costly = self._num_parsed > MAX_PARSED_AT_ONCE

    def _visible_event(self, event: SseEvent) -> SseEvent | None:
        if event.is_piece and self._num_tokens(1, event.raw):
            self._observer.saw_tokens(1)
        if event.usage is not None and self._prefill_usage is not None and not isinstance(event.body, Outline):
            event = self._events.corrected(event, self._prefill_usage)
        if event.usage is not None:
            self._observer.saw_usage(event.usage, is_total=event.is_total)
        if event.is_done:
            self.is_done = True
            self._observer.ended()
        return None if event.is_usage_only and not self._shows_usage else event

    async def _drain(self, writer: ResponseWriter) -> None:
        if not writer.is_blocked:
            return
        self._observer.held(is_held=True)
        await writer.drain()  # if it raises, the stream is over
        self._observer.held(is_held=False)

    def _on_parts(self, writer: ResponseWriter, parts: list[bytes]) -> bool:
        """Forward what one read brought. Returns whether more may follow at once."""
        return self._forward(writer, self._complete_events(b"".join(parts)))

    def _forward(self, writer: ResponseWriter, events: bytes) -> bool:
        if self._pending:
            events, self._pending = self._pending + events, b""
        shown = self.visible(events)
        if self.is_done:
            self._last = shown
            return False
        if shown:
            self._last_event_s = time.monotonic()
            if not writer.write(shown):
                return False
        elif time.monotonic() - self._last_event_s > self._timeout_s:  # comments keep `IdleTimeout` content
            message = f"sent no event within request_timeout_s={self._timeout_s:g}"
            self._failure = self._failure or EngineTimeout(self._engine, message)
        return self._failure is None

    def _put_off(self, events: bytes) -> None:
        """Go on with these events when there is time."""
        if events:
            self._pending = events
            self._reply.call_again()

    def _complete_events(self, data: bytes) -> bytes:
        try:
            events = self._splitter.push(data)
        except ValueError as exc:
            raise EngineFailed(self._engine, f"sent {exc}") from exc
        self._reply.is_bulky = self._splitter.num_bytes > QUICK_BYTES
        return events

    def _ended_early(self) -> EngineFailed:
        return EngineFailed(self._engine, "ended its stream in the middle")

"""The events of `/v1/responses` and `/v1/messages`: each has a type, and a type ends the stream.

event: response.output_text.delta
data: {"type": "response.output_text.delta", "delta": "a piece of text", ...}
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from typing_extensions import override

from tandem.frontend.http.errors import messages_error_type
from tandem.frontend.relay.answers import as_dict
from tandem.frontend.relay.sse import EventFormat, SseEvent, data_of
from tandem.frontend.relay.usage import (
    messages_pair_usage,
    messages_usage,
    responses_pair_usage,
    responses_usage,
)
from tandem.router.engines.bounded_json import NotJson, dumps, loads

Json = dict[str, Any]

# NOTE: line ends are escaped in JSON strings, so the text of an answer cannot contain these patterns.
_PIECES = re.compile(rb"(?:event: (?:response\.[a-z_.]+\.delta|content_block_delta)\ndata: [^\r\n]*\n\n)*")


class _TypedEvents(EventFormat):
    """What both formats share."""

    last_types: frozenset[str]  # types of events that end a stream

    @override
    def leading_pieces(self, events: bytes) -> tuple[int, int]:
        found = _PIECES.match(events)
        end = found.end() if found else 0
        return events.count(b"\n\n", 0, end), end

    @override
    def parse(self, raw: bytes) -> SseEvent:
        data = data_of(raw)
        try:
            body = loads(data) if data else None
        except NotJson:
            body = None
        if not isinstance(body, dict):
            return SseEvent(raw, None, is_opaque=bool(data))
        kind = str(body.get("type"))
        error = None
        if kind == "error":
            error = as_dict(body.get("error")) or body
        is_piece = kind.endswith("delta") and kind != "message_delta"
        event = SseEvent(raw, body, is_done=kind in self.last_types, is_piece=is_piece, error=error)
        usage = self.usage(body)
        return event if usage is None else replace(event, usage=usage, is_total=kind != "message_start")

    def usage(self, body: Json) -> Json | None:
        """The usage in an event, in the shape of chat completions."""
        raise NotImplementedError


class ResponseEvents(_TypedEvents):
    """Events of `/v1/responses`."""

    last_types = frozenset({"response.completed", "response.incomplete", "response.failed"})

    @override
    def usage(self, body: Json) -> Json | None:
        """The last event has it."""
        usage = as_dict(body.get("response")).get("usage")
        return responses_usage(usage) if isinstance(usage, dict) else None

    @override
    def error(self, error: Json) -> bytes:
        """The error's fields, and the error itself as in a response."""
        body = {"type": "error", "code": error.get("code"), "message": error.get("message"), "param": None}
        return _raw(body | {"error": error})

    @override
    def corrected(self, event: SseEvent, prefill_usage: Json) -> SseEvent:
        body = as_dict(event.body)
        response = as_dict(body.get("response"))
        usage = responses_pair_usage(as_dict(response.get("usage")), prefill_usage)
        return _with_body(event, body | {"response": response | {"usage": usage}}, responses_usage(usage))


class MessageEvents(_TypedEvents):
    """Events of `/v1/messages`."""

    last_types = frozenset({"message_stop"})

    @override
    def usage(self, body: Json) -> Json | None:
        """The first event and the last but one have it."""
        usage = body.get("usage") or as_dict(body.get("message")).get("usage")
        return messages_usage(usage) if isinstance(usage, dict) else None

    @override
    def error(self, error: Json) -> bytes:
        """The body of an error response."""
        shown = error | {"type": messages_error_type(str(error.get("type", "server_error")))}
        return _raw({"type": "error", "error": shown})

    @override
    def corrected(self, event: SseEvent, prefill_usage: Json) -> SseEvent:
        body = as_dict(event.body)
        holder = body if "usage" in body else as_dict(body.get("message"))
        usage = messages_pair_usage(as_dict(holder.get("usage")), prefill_usage)
        holder = holder | {"usage": usage}
        return _with_body(event, holder if "usage" in body else body | {"message": holder}, messages_usage(usage))


def _with_body(event: SseEvent, body: Json, usage: Json) -> SseEvent:
    return replace(event, raw=_raw(body), body=body, usage=usage)


def _raw(body: Json) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (str(body.get("type")).encode(), dumps(body))

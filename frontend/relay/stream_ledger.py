"""Records what was shown of a stream that may continue on another engine: text, token ids, and form of its events.

The engine is asked for token ids. They are taken out of the events again, so that the client sees what it would have
seen without them.
"""

from __future__ import annotations

import io
import re
from array import array
from typing import Any

import msgspec

from tandem.frontend.relay.answers import as_dict
from tandem.frontend.relay.sse import data_of, end_of_event
from tandem.router.engines.bounded_json import NotJson, Outline, dumps, loads

Json = dict[str, Any]

DONE = b"data: [DONE]\n\n"

# NOTE: quotes are escaped in JSON strings, so the text of an answer cannot contain these patterns.
# No list goes beyond the next quote, so that lists without an end take no more time than the bytes of the event.
_IDS = re.compile(rb'("(?:prompt_)?token_ids":)\s*\[[^\]"]*\]')
# The usual event, which is read without parsing it: a text and the ids of its tokens, and nothing else.
_PIECE = re.compile(
    rb'data: \{[^{}\[\]]*"choices":\[\{"index":0,(?:"text":|"delta":\{"content":)"([^"\\]*(?:\\.[^"\\]*)*)"\}?'
    rb'(?:,"[a-z_]+":null)*,"token_ids":\[(\d+(?:,\d+)*)\](?:,"[a-z_]+":null)*\}\](?:,"usage":null)?\}\n\n'
)
# What may be parsed in one call; what follows waits for a time slice.
_MAX_PARSED = 8  # events
_MIXED_BYTES = 8 * 1024  # bytes from the first of them on, with the usual events between them
_OWN_FIELDS = {"choices", "usage", "prompt_token_ids", "error"}  # of one event; the others are those of every event


class StreamLedger:
    """Follows the events of `/v1/chat/completions` or `/v1/completions`, of one choice."""

    def __init__(self, *, is_chat: bool, shows_ids: bool, shows_running_usage: bool) -> None:
        """`shows_ids`: the client asked for token ids. `shows_running_usage`: it gets usage with each event."""
        self.flaw = ""  # why the stream cannot go on; "" = it can
        self.is_finished = False  # the event with the reason of the end has come
        self.prompt_ids: array[int] | None = None
        self.output_ids: array[int] = array("I")
        self._is_chat = is_chat
        self._shows_ids = shows_ids
        self._shows_running_usage = shows_running_usage
        self._head: Json = {}  # fields that all events share
        self._text = io.StringIO()
        self._is_over = False  # an error has come: nothing behind it is shown
        self._is_restarted = False
        self._has_usage = False  # its event was shown

    @property
    def text(self) -> str:
        """The text that was shown."""
        return self._text.getvalue()

    @property
    def usage(self) -> Json:
        """Usage so far. For a stream that several engines computed, the number of cached tokens is not known."""
        num_prompt, num_output = len(self.prompt_ids or ()), len(self.output_ids)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}

    def restart(self) -> None:
        """Start over: another engine begins the same answer, of which no token was shown."""
        self._is_restarted = bool(self._head)
        self._is_over = False

    def follow(self, events: bytes) -> tuple[bytes, int, int, int]:
        """As `Rewrite`: note these events, which the client is shown next, and take the token ids out of them."""
        shown: list[bytes] = []
        start, num_pieces = self._take_pieces(events, 0, len(events), shown)
        num_parsed, limit = 0, min(len(events), start + _MIXED_BYTES)
        while start < limit and num_parsed < _MAX_PARSED:
            end = end_of_event(events, start)
            raw = events[start:end]
            shown.append(self._follow(raw) if b"data:" in raw else raw)
            num_parsed += 1
            start, _ = self._take_pieces(events, end, limit, shown)
        return b"".join(shown), 0 if num_parsed else num_pieces, num_parsed, start

    def note(self, text: str, token_ids: Any, *, is_last: bool) -> None:
        """Note a piece of the answer: the text that is shown, and the ids of the tokens that came with it."""
        self._text.write(text)
        self.is_finished = self.is_finished or is_last
        if token_ids is None and (text or is_last):
            self.flaw = self.flaw or "its engine gave no token ids"
        try:
            self.output_ids.extend(token_ids or ())
        except (TypeError, OverflowError):
            self.flaw = "its engine gave token ids that are none"

    def piece(self, text: str, choice: Json) -> bytes:
        """An event in the form of those before, with this text and the end of `choice`."""
        reason = choice.get("finish_reason")
        shown: Json = {"delta": {"content": text}} if self._is_chat else {"text": text}
        shown = {"index": 0, **shown, "logprobs": None, "finish_reason": reason}
        if reason is not None:
            shown["stop_reason"] = choice.get("stop_reason")
        if self._shows_ids:
            shown["token_ids"] = choice.get("token_ids")
        return self._event([shown], self.usage if self._shows_running_usage else None)

    def usage_event(self) -> bytes:
        """The event with the usage of the whole answer, unless it was shown."""
        if self._has_usage:
            return b""
        self._has_usage = True
        return self._event([], self.usage)

    def ending(self) -> bytes:
        """The last events that were not shown yet."""
        return self.usage_event() + DONE

    def _event(self, choices: list[Json], usage: Json | None) -> bytes:
        body = self._head | {"choices": choices}
        return b"data: " + dumps(body if usage is None else body | {"usage": usage}) + b"\n\n"

    def _follow(self, raw: bytes) -> bytes:
        if self._is_over:
            return raw
        body = body_of(raw)
        if body is None or isinstance(body, Outline):
            if b'"choices"' in raw:
                what = "not JSON" if body is None else "too large to be followed"
                self.flaw = f"its engine sent an event that is {what}"
            return self._without_ids(raw)
        if body.get("error"):
            self._is_over = True
            return raw
        choices = body.get("choices")
        if not choices:
            self._has_usage = self._has_usage or bool(body.get("usage"))
            return raw
        is_role_again = self._note_choices(body, choices)
        if self._is_restarted:
            if is_role_again:
                return b""
            raw = b"data: " + dumps(body | self._head) + b"\n\n"
        return self._without_ids(raw)

    def _without_ids(self, raw: bytes) -> bytes:
        return raw if self._shows_ids else _IDS.sub(rb"\1null", raw)

    def _take_pieces(self, events: bytes, start: int, limit: int, shown: list[bytes]) -> tuple[int, int]:
        """Note the events of the usual form from `start` on, and show them. Returns the end and the number of them."""
        copied, num_pieces = start, 0
        while (found := _PIECE.match(events, start, limit)) is not None and self._note_piece(found):
            if not self._shows_ids:
                shown += (events[copied : found.start(2) - 1], b"null")
                copied = found.end(2) + 1
            start = found.end()
            num_pieces += 1
        shown.append(events[copied:start])
        return start, num_pieces

    def _note_piece(self, found: re.Match[bytes]) -> bool:
        """Note an event of the usual form. Returns whether nothing else has to be done."""
        if self._is_over or self._is_restarted or not self._head:
            return False
        text, ids = found.groups()
        try:
            shown = msgspec.json.decode(b'"%b"' % text, type=str) if b"\\" in text else text.decode()
            if b"," in ids:
                self.output_ids.extend(map(int, ids.split(b",")))
            else:
                self.output_ids.append(int(ids))
        except (ValueError, OverflowError):
            return False
        self._text.write(shown)
        return True

    def _note_choices(self, body: Json, choices: Any) -> bool:
        """Note an event. Returns whether it does nothing but open the answer."""
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            self.flaw = "it has several choices"
            return False
        self._head = self._head or {name: value for name, value in body.items() if name not in _OWN_FIELDS}
        if (prompt_ids := body.get("prompt_token_ids") or choice.get("prompt_token_ids")) is not None:
            try:
                self.prompt_ids = array("I", prompt_ids)
            except (TypeError, OverflowError):
                self.flaw = "its engine gave token ids that are none"
        text, is_last = self._text_of(choice), choice.get("finish_reason") is not None
        self.note(text, choice.get("token_ids"), is_last=is_last)
        return self._is_chat and not text and not is_last and not choice.get("token_ids")

    def _text_of(self, choice: Json) -> str:
        text = choice.get("text")
        if self._is_chat:
            delta = as_dict(choice.get("delta"))
            text = delta.get("content")
            if extra := [name for name, value in delta.items() if value and name not in ("role", "content")]:
                self.flaw = f"its engine parsed '{extra[0][:50]}' from the text"
        return text if isinstance(text, str) else ""


def body_of(raw: bytes) -> Json | None:
    """The JSON object in one whole event, if there is one."""
    try:
        body = loads(raw[6:] if raw.startswith(b"data: {") and raw.endswith(b"}\n\n") else data_of(raw))
    except NotJson:
        return None
    return body if isinstance(body, dict) else None

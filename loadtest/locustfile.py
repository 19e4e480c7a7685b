"""Locust users of a chat endpoint: some hold conversations, some send unrelated prompts. All requests stream.

Besides the requests, locust's table shows `ttft` (request to first token) and `itl` (gap between two streamed events).

    locust -f loadtest/locustfile.py --headless -u 8 -r 8 -t 30s --host http://127.0.0.1:8000

TANDEM_MODEL names the model (default: the server's first), TANDEM_MAX_TOKENS the longest answer (default 64).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from geventhttpclient.response import HTTPParseError
from locust import FastHttpUser, between

from tandem.loadtest.prompts import random_messages

_MAX_TOKENS = int(os.environ.get("TANDEM_MAX_TOKENS", "64"))
_TURNS = 4
_WORDS_PER_TURN = 80
_PATH = "/v1/chat/completions"


class ChatUser(FastHttpUser):  # type: ignore[misc]  # locust is untyped here
    """One person, who mostly holds four-turn conversations and sometimes asks a single question."""

    wait_time = between(0.0, 0.5)
    insecure = False  # check certificates, against the CA of SSL_CERT_FILE too
    network_timeout = 600.0  # a queued prompt gets no bytes for long

    def on_start(self) -> None:
        """Get the model's name once."""
        self.rng = random.Random(id(self))
        self.model = os.environ.get("TANDEM_MODEL") or self.client.get("/v1/models").json()["data"][0]["id"]

    def conversation(self) -> None:
        """Several turns that resend their history: all but the first can hit the prefix cache."""
        history: list[dict[str, str]] = []
        for _ in range(_TURNS):
            messages = random_messages(self.rng, history, _WORDS_PER_TURN)
            answer = self._stream("conversation", messages)
            if answer is None:
                return
            history = [*messages, {"role": "assistant", "content": answer}]

    def question(self) -> None:
        """A prompt that no user has sent before."""
        self._stream("question", random_messages(self.rng, [], 2 * _WORDS_PER_TURN))

    tasks = {conversation: 3, question: 1}  # noqa: RUF012  # how locust reads weights

    def _stream(self, name: str, messages: list[dict[str, str]]) -> str | None:
        """The answer, or None if the request failed. Its times are fired as locust events."""
        body = {"model": self.model, "messages": messages, "max_tokens": _MAX_TOKENS, "stream": True}
        started = last = time.perf_counter()
        pieces: list[str] = []
        with self.client.post(_PATH, json=body, name=name, stream=True, catch_response=True) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}")
                return None
            try:
                for piece in _pieces(response.stream):
                    now = time.perf_counter()
                    self._report("itl" if pieces else "ttft", now - last)
                    last = now
                    pieces.append(piece)
            except (HTTPParseError, OSError) as exc:
                response.failure(exc)
                return None
            response.request_meta["response_time"] = (last - started) * 1e3
            if not pieces:
                response.failure("the stream brought no output")
                return None
            response.success()
        return "".join(pieces)

    def _report(self, name: str, duration_s: float) -> None:
        self.environment.events.request.fire(
            request_type="SSE", name=name, response_time=duration_s * 1e3, response_length=0, exception=None, context={}
        )


def _pieces(stream: Any) -> Iterator[str]:
    """The text of each event as it arrives. Raises `ConnectionError` for a stream that ends before [DONE]."""
    while line := stream.readline(b"\n"):
        if not line.startswith(b"data:"):
            continue
        content = line[len(b"data:") :].strip()
        if content == b"[DONE]":
            stream.read()  # reads to the end of the answer, so that the connection can be used again
            return
        event = msgspec.json.decode(content)
        if "error" in event:
            raise ConnectionError(f"error event: {event['error']}")
        for choice in event["choices"]:
            delta = choice["delta"]
            piece = delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")
            if piece:
                yield piece
    raise ConnectionError("the stream ended without [DONE]")

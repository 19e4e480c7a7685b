"""A proxy between an agent and a server, which makes the model call one of the agent's tools first.

A model small enough for tests does not call tools by itself. In the first request that offers the agent's tool,
`tool_choice` names that tool, and its schema allows one input alone. All else passes as it came, and what was asked and
answered is recorded. It also stands for the proxy to other hosts: those it refuses.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tandem.frontend.http.sessions import SESSION_HEADERS

Json = dict[str, Any]
IGNORED = "x-tandem-ignored"
NOT_PASSED = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "expect"}
ANSWER_S = 120.0
SHOWN_BYTES = 2000
PROMPT_TOKENS = (rb'"(?:prompt|input)_tokens": ?(\d+)', rb'"cache_read_input_tokens": ?(\d+)')  # to be added


@dataclass(frozen=True)
class ForcedCall:
    """The tool of an agent that its first request must call, and the only input that the model may give it."""

    tool: str
    input: Json


@dataclass(frozen=True)
class Exchange:
    """A request and how it was answered."""

    path: str
    status: int
    was_forced: bool
    session: str  # what names the conversation: a header or a field of the body; "" = nothing
    num_prompt_tokens: int  # 0 = the answer did not say
    ignored: frozenset[str]
    body: str
    error: str


@dataclass(eq=False)
class ForcingProxy:
    """Forwards to `url`. What it saw is in `exchanges`, in the order of the answers' ends."""

    url: str
    call: ForcedCall | None
    port: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)  # other hosts that the agent wanted to reach through it
    _is_done: bool = False

    @property
    def base_url(self) -> str:
        """Where the agent finds it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def ignored(self) -> list[str]:
        """The fields and headers that the server named as ignored."""
        return sorted({name for exchange in self.exchanges for name in exchange.ignored})

    def num_told(self, text: str) -> int:
        """How many requests had this text."""
        return sum(text in exchange.body for exchange in self.exchanges)

    def forced(self, body: bytes) -> bytes | None:
        """The body with the call forced; None if it is passed as it came."""
        if self.call is None or self._is_done or not body.startswith(b"{"):
            return None
        request: Json = json.loads(body)
        self._is_done = force(request, self.call)
        return json.dumps(request).encode() if self._is_done else None


def force(request: Json, call: ForcedCall) -> bool:
    """Change a request of chat, Responses or Messages so that it calls this tool; false if it does not offer it."""
    for tool in request.get("tools") or ():
        function = tool.get("function", tool)
        if function.get("name") != call.tool:
            continue
        only = {name: {"const": value} for name, value in call.input.items()}
        schema = {"type": "object", "properties": only, "required": [*only], "additionalProperties": False}
        function["input_schema" if "input_schema" in function else "parameters"] = schema
        request["tool_choice"] = _choice(request, tool, call.tool)
        return True
    return False


def _choice(request: Json, tool: Json, name: str) -> Json:
    if "input_schema" in tool:
        return {"type": "tool", "name": name}
    if "function" in tool:
        return {"type": "function", "function": {"name": name}}
    return {"type": "function", "name": name}


@contextmanager
def forcing_proxy(url: str, call: ForcedCall | None = None) -> Iterator[ForcingProxy]:
    """A proxy before the server at `url`, on a port of its own; without a call it changes nothing."""
    proxy = ForcingProxy(url, call)
    with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as client:
        server = _Server(proxy, client)
        proxy.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, name="forcing-proxy")
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _session(headers: Mapping[str, str], body: bytes) -> str:
    names = [name for name in SESSION_HEADERS if name in headers]
    return names[0] if names else "prompt_cache_key" if b'"prompt_cache_key":' in body else ""


def _num_prompt_tokens(answer: bytes) -> int:
    return sum(max(map(int, re.findall(pattern, answer)), default=0) for pattern in PROMPT_TOKENS)


def _names(listed: str) -> list[str]:
    """The names in the header, without the remark that may follow each."""
    return [part.partition(" (")[0].strip() for part in listed.split(",") if part.strip()]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: ForcingProxy, client: httpx.Client) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self.client = client


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_CONNECT(self) -> None:
        self.server.proxy.elsewhere.append(self.path)
        self.send_error(403)

    def do_POST(self) -> None:
        if self.path.startswith("/"):
            self._forward()
        else:
            self.do_CONNECT()

    do_GET = do_HEAD = do_DELETE = do_PUT = do_PATCH = do_OPTIONS = do_POST

    def _forward(self) -> None:
        body = self._body()
        forced = self.server.proxy.forced(body)
        headers = [(name, value) for name, value in self.headers.items() if name.lower() not in NOT_PASSED]
        with self.server.client.stream(self.command, self.path, content=forced or body, headers=headers) as answer:
            beginning, end = self._pass_on(answer)
        self.server.proxy.exchanges.append(
            Exchange(
                path=self.path.partition("?")[0],
                status=answer.status_code,
                was_forced=forced is not None,
                session=_session(self.headers, body),
                num_prompt_tokens=_num_prompt_tokens(beginning + end),
                ignored=frozenset(_names(answer.headers.get(IGNORED, ""))),
                body=body.decode(errors="replace"),
                error=beginning.decode(errors="replace") if answer.is_error else "",
            )
        )

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        parts: list[bytes] = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _pass_on(self, answer: httpx.Response) -> tuple[bytes, bytes]:
        """Send the answer as it arrives; returns its beginning and its end."""
        self.send_response(answer.status_code)
        for name, value in answer.headers.multi_items():
            if name not in NOT_PASSED:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        beginning = end = b""
        for piece in answer.iter_raw():
            beginning, end = (beginning + piece)[:SHOWN_BYTES], (end + piece)[-SHOWN_BYTES:]
            self.wfile.write(piece)
            self.wfile.flush()
        return beginning, end

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is written to the terminal."""

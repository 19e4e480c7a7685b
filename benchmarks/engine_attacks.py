"""An engine that attacks its router: a server that behaves until it is told which attack to make.

    python -m benchmarks.engine_attacks PORT KV_PORT KV_REPLAY_PORT

`POST /arm` with the name of an attack as its body begins it, and `POST /disarm` ends it. Every attack is bounded in
bytes and time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import uvloop
from zmq.asyncio import Context
from zmq.constants import SocketType

MODEL = "hostile"
PROBED_S = 6.0  # how long an attack by answers to probes or by KV events lasts
_BLOCK = 1 << 16  # bytes written at once
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
_JSON = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nconnection: close\r\n"
_TEXT = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain%b\r\nconnection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_LOAD = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
_CACHE = b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="4096"} 1\n'
_PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
_USED = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":1}}\n\n'


def _repeated(unit: bytes, num_bytes: int) -> Iterator[bytes]:
    block = unit * max(1, _BLOCK // len(unit))
    for _ in range(num_bytes // len(block) + 1):
        yield block


def _metrics(*, charset: bytes = b"") -> bytes:
    return _TEXT % charset + b"\r\n"


def _lists(num_bytes: int) -> Iterator[bytes]:
    return _repeated(b"[],", num_bytes)


def _usage_events() -> Iterator[bytes]:
    for _ in range(20):
        yield b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":1,"more":['
        yield from _lists(900_000)
        yield b"[]]}}\n\n"


def _unfinished_ids() -> Iterator[bytes]:
    yield _PIECE
    for _ in range(5):
        yield b'data: {"choices":[' + b'"token_ids":[' * 10_000 + b"}\n\n"


@dataclass(frozen=True, slots=True)
class Attack:
    """What the engine sends, and in answer to what. `num_clients` requests for an answer are made at once."""

    name: str
    wire: Callable[[], Iterable[bytes]]
    path: str = "/v1/chat/completions"  # or one of the probes, or "kv" for events
    num_clients: int = 1
    is_stream: bool = True
    pause_s: float = 0.0  # after each block: the router reads them one by one


def _stream(*parts: Iterable[bytes]) -> Iterator[bytes]:
    return itertools.chain([_STREAM + b"\r\n"], *parts)


def _kv_batch(events: bytes, count: int) -> bytes:
    return b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + events + b"\x00"


def _big_kv_event() -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": list(range(180_000)),
        "parent_block_hash": None,
        "token_ids": [1] * 3_000_000,
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return _kv_batch(msgspec.msgpack.encode(event), 1)


def _small_kv_events() -> Iterator[bytes]:
    for number in itertools.count():
        event = {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}
        yield _kv_batch(msgspec.msgpack.encode(event), 1)


ATTACKS = (
    Attack("36 MB of comments", lambda: _stream(_repeated(b":\n\n", 36_000_000))),
    Attack(
        "one event without an end",
        lambda: _stream([b'data: {"choices":[{"text":"'], itertools.repeat(b"a" * 8192, 1_900)),
        pause_s=0.0005,
    ),
    Attack("3 million tiny events", lambda: _stream(_repeated(b"data: {}\n\n", 30_000_000))),
    Attack("no attack: 64 streams of text", lambda: _stream(_repeated(_PIECE, 4_000_000)), num_clients=64),
    Attack("tiny events, 64 streams", lambda: _stream(_repeated(b"data: {}\n\n", 1_000_000)), num_clients=64),
    Attack(
        "roles, no token",
        lambda: _stream(_repeated(b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n', 20_000_000)),
    ),
    Attack("0.9 MB events with usage", lambda: _stream(_usage_events())),
    Attack("0.9 MB events with usage, 64 streams", lambda: _stream(_usage_events()), num_clients=64),
    Attack("pieces with usage, 200 streams", lambda: _stream(_repeated(_USED, 2_000_000)), num_clients=200),
    Attack("token ids without an end", lambda: _stream(_unfinished_ids())),
    Attack(
        "chunks of one byte",
        lambda: itertools.chain([_STREAM + _CHUNKED + b"\r\n"], _repeated(b"1\r\n:\r\n", 20_000_000)),
    ),
    Attack("interim answers", lambda: _repeated(b"HTTP/1.1 103 X\r\n\r\n", 10_000_000)),
    Attack(
        "plain answer, 30 MB of lists",
        lambda: [_JSON % 200 + b'\r\n{"choices":[', *_lists(30_000_000), b"[]]}"],
        is_stream=False,
    ),
    Attack(
        "error of 30 MB of lists",
        lambda: [_JSON % 400 + b'\r\n{"error":{"message":[', *_lists(30_000_000), b"[]]}}"],
        is_stream=False,
    ),
    Attack("/metrics, 5.4 MB of load", lambda: [_metrics(), *_repeated(_LOAD, 5_400_000)], "/metrics"),
    Attack("/metrics, 7.9 MB of lines", lambda: [_metrics(), *_repeated(b"\n", 7_800_000)], "/metrics"),
    Attack(
        "/metrics in punycode",
        lambda: [_metrics(charset=b"; charset=punycode"), *_repeated(b"a", 400_000)],
        "/metrics",
    ),
    Attack(
        "/metrics, chunks of one byte",
        lambda: itertools.chain([_TEXT % b"" + _CHUNKED + b"\r\n"], _repeated(b"1\r\na\r\n", 6_000_000)),
        "/metrics",
    ),
    Attack(
        "/v1/models, 7.5 MB of lists",
        lambda: [_JSON % 200 + b'\r\n{"data":[', *_lists(7_500_000), b"[]]}"],
        "/v1/models",
    ),
    Attack("/health, interim answers", lambda: _repeated(b"HTTP/1.1 103 X\r\n\r\n", 20_000_000), "/health"),
    Attack("KV events of 4 MB", lambda: itertools.repeat(_kv_batch(b"\x80" * 4_000_000, 4_000_000)), "kv"),
    Attack("KV events of 180,000 blocks", lambda: itertools.repeat(_big_kv_event()), "kv"),
    Attack("KV events without an end", _small_kv_events, "kv"),
)
_BY_NAME = {attack.name: attack for attack in ATTACKS}


class _Engine:
    """The server. It makes one attack at a time."""

    def __init__(self, kv_port: int, kv_replay_port: int) -> None:
        self._armed: Attack | None = None
        context = Context()
        self._events = context.socket(SocketType.PUB)
        self._events.sndhwm = 1000
        self._events.bind(f"tcp://127.0.0.1:{kv_port}")
        self._replay = context.socket(SocketType.ROUTER)
        self._replay.bind(f"tcp://127.0.0.1:{kv_replay_port}")
        self._number = 0
        self._tasks = {asyncio.create_task(self._answer_replays())}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                body = await reader.readexactly(length)
                target = head.split(b" ", 2)[1].decode()
                if await self._answer(target, body, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, target: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection is over."""
        path = target.partition("?")[0]
        if path == "/arm":
            self._arm(_BY_NAME[body.decode()])
        elif path == "/disarm":
            self._armed = None
        elif self._armed is not None and path == self._armed.path:
            await self._attack(self._armed, writer)
            return True
        writer.write(_good_answer(path))
        await writer.drain()
        return False

    def _arm(self, attack: Attack) -> None:
        self._armed = attack
        if attack.path == "kv":
            task = asyncio.create_task(self._publish(attack))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _attack(self, attack: Attack, writer: asyncio.StreamWriter) -> None:
        for block in attack.wire():
            writer.write(block)
            await writer.drain()
            if attack.pause_s:
                await asyncio.sleep(attack.pause_s)
            if self._armed is not attack:
                return

    async def _publish(self, attack: Attack) -> None:
        ends_s = time.monotonic() + PROBED_S
        for payload in attack.wire():
            if self._armed is not attack or time.monotonic() > ends_s:
                return
            await self._events.send_multipart([b"kv", self._number.to_bytes(8, "big"), payload])
            self._number += 1
            if len(payload) > _BLOCK or self._number % 200 == 0:
                await asyncio.sleep(0.002)

    async def _answer_replays(self) -> None:
        while True:
            peer, empty, _ = await self._replay.recv_multipart()
            await self._replay.send_multipart([peer, empty, b"", (-1).to_bytes(8, "big", signed=True), b""])


def _good_answer(path: str) -> bytes:
    body = {
        "/v1/models": b'{"object":"list","data":[{"id":"%b","object":"model","max_model_len":8192}]}' % MODEL.encode(),
        "/metrics": _LOAD + _CACHE,
        "/version": b'{"version":"0.32.0"}',
    }.get(path, b"{}")
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


async def _serve(port: int, kv_port: int, kv_replay_port: int) -> None:
    engine = _Engine(kv_port, kv_replay_port)
    async with await asyncio.start_server(engine.serve, "127.0.0.1", port, limit=1 << 22) as server:
        await server.serve_forever()


def main() -> None:
    port, kv_port, kv_replay_port = map(int, sys.argv[1:])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for number in (signal.SIGINT, signal.SIGTERM):
            runner.get_loop().add_signal_handler(number, os._exit, 0)  # whatever ZMQ has not sent
        runner.run(_serve(port, kv_port, kv_replay_port))


if __name__ == "__main__":
    main()

"""An engine that attacks its router: a server that behaves until it is told which attack to make.

    python -m benchmarks.engine_attacks PORT KV_PORT KV_REPLAY_PORT

`POST /arm` with the name of an attack as its body begins it, and `POST /disarm` ends it. Every attack is bounded in
bytes and time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import uvloop
from zmq.asyncio import Context
from zmq.constants import SocketType

MODEL = "hostile"
PROBED_S = 6.0  # how long an attack by answers to probes or by KV events lasts
_BLOCK = 1 << 16  # bytes written at once
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
_JSON = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
_TEXT = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain%b\r\nconnection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
_METRICS = _TEXT % b"" + b"\r\n"
_INTERIM = b"HTTP/1.1 103 X\r\n\r\n"
_LOAD = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n'
_CACHE = b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="4096"} 1\n'
_PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
_ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n'
_USED = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":1%b}}\n\n'
_MUCH_USED = _USED % (b',"more":[' + b"[]," * 300_000 + b"[]]")
_UNFINISHED_IDS = b'data: {"choices":[' + b'"token_ids":[' * 10_000 + b"}\n\n"


@dataclass(frozen=True, slots=True)
class Attack:
    """What the engine sends, and in answer to what. `num_clients` requests for an answer are made at once."""

    name: str
    unit: bytes  # sent again and again
    num_bytes: int  # of all units
    start: bytes = _STREAM + b"\r\n"
    end: bytes = b""
    path: str = "/v1/chat/completions"  # or one of the probes, or "kv" for events
    num_clients: int = 1
    is_stream: bool = True
    pause_s: float = 0.0  # after each unit: the router reads them one by one

    def blocks(self) -> Iterator[bytes]:
        """What is written at once, in order."""
        block = self.unit if self.pause_s else self.unit * max(1, _BLOCK // len(self.unit))
        yield self.start
        for _ in range(self.num_bytes // len(block) + 1):
            yield block
        yield self.end


def _kv_batch(events: bytes, count: int = 1) -> bytes:
    return b"\x93\xcb" + bytes(8) + b"\xdd" + count.to_bytes(4, "big") + events + b"\x00"


def _kv_event(kind: str, hashes: list[int], **fields: object) -> bytes:
    return _kv_batch(msgspec.msgpack.encode({"type": kind, "block_hashes": hashes, "medium": "GPU", **fields}))


def _big_kv_event() -> bytes:
    fields = {"parent_block_hash": None, "block_size": 16, "lora_id": None, "lora_name": None}
    return _kv_event("BlockStored", list(range(180_000)), token_ids=[1] * 3_000_000, **fields)


ATTACKS = (
    Attack("36 MB of comments", b":\n\n", 36_000_000),
    Attack(
        "one event without an end",
        b"a" * 8192,
        15_500_000,
        start=_STREAM + b'\r\ndata: {"choices":[{"text":"',
        pause_s=0.0005,
    ),
    Attack("3 million tiny events", b"data: {}\n\n", 30_000_000),
    Attack("no attack: 64 streams of text", _PIECE, 4_000_000, num_clients=64),
    Attack("tiny events, 64 streams", b"data: {}\n\n", 1_000_000, num_clients=64),
    Attack("roles, no token", _ROLE, 20_000_000),
    Attack("0.9 MB events with usage", _MUCH_USED, 18_000_000),
    Attack("0.9 MB events with usage, 64 streams", _MUCH_USED, 18_000_000, num_clients=64),
    Attack("pieces with usage, 200 streams", _USED % b"", 2_000_000, num_clients=200),
    Attack("token ids without an end", _UNFINISHED_IDS, 600_000, start=_STREAM + b"\r\n" + _PIECE),
    Attack("chunks of one byte", b"1\r\n:\r\n", 20_000_000, start=_STREAM + _CHUNKED),
    Attack("interim answers", _INTERIM, 10_000_000, start=b""),
    Attack(
        "plain answer, 30 MB of lists",
        b"[],",
        30_000_000,
        start=_JSON % 200 + b'{"choices":[',
        end=b"[]]}",
        is_stream=False,
    ),
    Attack(
        "error of 30 MB of lists",
        b"[],",
        30_000_000,
        start=_JSON % 400 + b'{"error":{"message":[',
        end=b"[]]}}",
        is_stream=False,
    ),
    Attack("/metrics, 5.4 MB of load", _LOAD, 5_400_000, start=_METRICS, path="/metrics"),
    Attack("/metrics, 7.9 MB of lines", b"\n", 7_800_000, start=_METRICS, path="/metrics"),
    Attack("/metrics in punycode", b"a", 400_000, start=_TEXT % b"; charset=punycode" + b"\r\n", path="/metrics"),
    Attack("/metrics, chunks of one byte", b"1\r\na\r\n", 6_000_000, start=_TEXT % b"" + _CHUNKED, path="/metrics"),
    Attack(
        "/v1/models, 7.5 MB of lists",
        b"[],",
        7_500_000,
        start=_JSON % 200 + b'{"data":[',
        end=b"[]]}",
        path="/v1/models",
    ),
    Attack("/health, interim answers", _INTERIM, 20_000_000, start=b"", path="/health"),
    Attack("KV events of 4 MB", _kv_batch(b"\x80" * 4_000_000, 4_000_000), 0, path="kv"),
    Attack("KV events of 180,000 blocks", _big_kv_event(), 0, path="kv"),
    Attack("KV events without an end", _kv_event("BlockRemoved", [0]), 0, path="kv"),
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
        for block in attack.blocks():
            writer.write(block)
            await writer.drain()
            if attack.pause_s:
                await asyncio.sleep(attack.pause_s)
            if self._armed is not attack:
                return

    async def _publish(self, attack: Attack) -> None:
        ends_s = time.monotonic() + PROBED_S
        while self._armed is attack and time.monotonic() < ends_s:
            await self._events.send_multipart([b"kv", self._number.to_bytes(8, "big"), attack.unit])
            self._number += 1
            if len(attack.unit) > _BLOCK or self._number % 200 == 0:
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

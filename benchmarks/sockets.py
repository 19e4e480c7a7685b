"""Cost of a message between the router and a worker: over TCP or a Unix socket, plain or with CURVE.

    python -m benchmarks.sockets [--quick]

One process: a thread that sends and one that receives. Messages are those of a step with this many sequences. CURVE
works in ZeroMQ's own threads, so it costs processor time and latency rather than time of the sender.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.constants import SocketType

from tandem.protocol.messages import SequenceDelta, StepOutput, StepStats, WorkerLoad, encode_message
from tandem.runtime.curve import KeyAuthenticator, listening_socket, make_keys
from tandem.runtime.dropped import DroppedMessages

_SEQUENCES = (1, 16, 64)


def step_output(num_sequences: int) -> bytes:
    """The message a worker sends for one step."""
    deltas = [SequenceDelta(f"chatcmpl-{number:032x}-0", 17, [4711]) for number in range(num_sequences)]
    return encode_message(
        StepOutput(worker_id="decode-0", epoch=1, deltas=deltas, stats=StepStats(duration_s=0.02), load=WorkerLoad())
    )


@contextmanager
def connected(endpoint: str, *, is_secured: bool) -> Iterator[tuple[Any, Any, bytes]]:
    """A ROUTER, a DEALER that is connected to it, and its identity there."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    keys, router_keys = make_keys(), make_keys()
    if is_secured:
        authenticator = KeyAuthenticator(context, DroppedMessages())
        authenticator.allow(router_keys.public)
        worker = listening_socket(context, SocketType.ROUTER, keys, max_queued=0)
    else:
        worker = context.socket(SocketType.ROUTER)
    router = context.socket(SocketType.DEALER)
    for socket in (worker, router):
        socket.linger = socket.sndhwm = socket.rcvhwm = 0
    if is_secured:
        router.curve_publickey, router.curve_secretkey = router_keys.public.encode(), router_keys.secret
        router.curve_serverkey = keys.public.encode()
    worker.bind(endpoint)
    router.connect(worker.last_endpoint)
    router.send(b"")
    try:
        yield worker, router, worker.recv_multipart()[0]
    finally:
        worker.close()
        router.close()
        context.term()


def measure(endpoint: str, data: bytes, count: int, *, is_secured: bool) -> tuple[float, float, float]:
    """Messages per second, processor seconds of each, and the median seconds of one alone."""
    with connected(endpoint, is_secured=is_secured) as (worker, router, identity):

        def send() -> None:
            for _ in range(count):
                worker.send_multipart([identity, data])

        started, cpu_started = time.perf_counter(), time.process_time()
        sender = threading.Thread(target=send)
        sender.start()
        for _ in range(count):
            router.recv()
        rate, cpu_s = count / (time.perf_counter() - started), (time.process_time() - cpu_started) / count
        sender.join()
        alone = []
        for _ in range(1000):
            started = time.perf_counter()
            worker.send_multipart([identity, data])
            router.recv()
            alone.append(time.perf_counter() - started)
        return rate, cpu_s, statistics.median(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer messages")
    count = 5_000 if parser.parse_args().quick else 50_000
    print("sequences  bytes  way            messages/s  CPU us  alone us")
    for num_sequences in _SEQUENCES:
        data = step_output(num_sequences)
        for way in ("tcp", "ipc"):
            for is_secured in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    endpoint = "tcp://127.0.0.1:*" if way == "tcp" else f"ipc://{folder}/s"
                    rate, cpu_s, alone_s = measure(endpoint, data, count, is_secured=is_secured)
                name = f"{way} {'CURVE' if is_secured else 'plain'}"
                print(
                    f"{num_sequences:9}  {len(data):5}  {name:13}  {rate:10,.0f}  {cpu_s * 1e6:6.1f}"
                    f"  {alone_s * 1e6:8.1f}"
                )


if __name__ == "__main__":
    main()

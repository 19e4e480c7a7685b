"""A process that was told nothing but where a worker listens. Prints the kinds of all that it is answered, one a line.

    python -m tests.support.stranger ENDPOINT HEARTBEATS SERVER_KEY MODE [PUBLIC SECRET]

Modes: `null` speaks without CURVE, `wrong-server` expects another key than the worker's, `own` brings a key that it
made itself, `given` the one of the command line.
"""

from __future__ import annotations

import sys
import time

import zmq

from tandem.protocol.messages import (
    Generate,
    Hello,
    PeerAddress,
    PeerHello,
    Pin,
    ReadRequest,
    SnapshotRequest,
    decode_message,
    encode_message,
)
from tandem.protocol.sampling import SamplingParams
from tandem.runtime.curve import KeyPair, make_keys

PATIENCE_S = 1.5
ME = PeerAddress("stranger", 1, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
MESSAGES = (
    Hello(router_id="stranger"),
    SnapshotRequest(places=["pool"]),
    Generate(request_id="stranger", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=1)),
    PeerHello(sender=ME, compatibility={}),
    ReadRequest(sender=ME, read_id=1, digests=[b"d" * 16], ttl_s=5.0),
    Pin(pin_id="p", digests=[b"d" * 16], ttl_s=5.0),
)


def main() -> None:
    endpoint, heartbeats, server_key, mode, *given = sys.argv[1:]
    keys = KeyPair(given[0], given[1].encode()) if given else make_keys()
    context: zmq.Context = zmq.Context()
    poller = zmq.Poller()
    for kind, where in ((zmq.DEALER, endpoint), (zmq.SUB, heartbeats)):
        socket = context.socket(kind)
        socket.linger = 0
        if mode != "null":
            socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret
            socket.curve_serverkey = (make_keys().public if mode == "wrong-server" else server_key).encode()
        socket.connect(where)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        else:
            for message in MESSAGES:
                socket.send(encode_message(message))
        poller.register(socket, zmq.POLLIN)
    deadline = time.monotonic() + PATIENCE_S
    while (left := deadline - time.monotonic()) > 0:
        for socket, _ in poller.poll(int(left * 1000)):
            print(type(decode_message(socket.recv())).__name__, flush=True)
    context.destroy(linger=0)


if __name__ == "__main__":
    main()

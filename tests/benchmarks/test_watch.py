"""What honest clients wait for is noted by a process of its own."""

from __future__ import annotations

import http.server
import threading
import time

import pytest

from benchmarks.watch import ANSWER, GAP, HEALTH, STREAM, Watched, longest_s, taken, watching


class _Engine(http.server.BaseHTTPRequestHandler):
    """Well at first, and then not; its streams have two tokens, and no end."""

    num_asked = 0
    all_asked = threading.Event()
    num_streamed = 0
    all_streamed = threading.Event()

    def do_GET(self) -> None:
        _Engine.num_asked += 1
        self.send_response(200 if _Engine.num_asked == 1 else 503)
        self.end_headers()
        if _Engine.num_asked == 3:
            self.all_asked.set()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        for _ in range(2):
            self.wfile.write(b"data: {}\n\n")
            time.sleep(0.05)  # the gap that is measured
        _Engine.num_streamed += 1
        if _Engine.num_streamed == 2:
            self.all_streamed.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.parametrize("kind", [HEALTH, GAP])
def test_waits_and_what_was_lost_are_noted(kind: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Engine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with watching(Watched(server.server_address[1]), kind) as watch:
            assert (_Engine.all_asked if kind == HEALTH else _Engine.all_streamed).wait(60.0)
            waits = taken(watch, is_end=True)
        server.shutdown()
    assert waits[ANSWER] == []
    if kind == HEALTH:
        assert [wait.is_lost for wait in waits[HEALTH][:2]] == [False, True]
        assert longest_s(waits[HEALTH]) > 0
    else:
        assert longest_s(waits[GAP]) >= 0.04
        assert waits[STREAM][0].is_lost, "it was cut before its end"

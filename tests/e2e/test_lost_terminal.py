"""A server goes on when nobody reads any more what it says: the reader of its pipe, or its terminal, has ended."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.server import HTTP, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.mark.slow
@pytest.mark.parametrize("open_pair", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_a_server_without_a_reader_goes_on(
    text_model: Path, tmp_path: Path, open_pair: Callable[[], tuple[int, int]]
) -> None:
    reader, writer = open_pair()
    flags, plain = ("--colocated", "--pool-bytes", "20000000"), {"TERM": "dumb"}
    with started(text_model, tmp_path, *flags, env=plain, terminal=writer) as server:
        os.close(writer)
        while b"Serving" not in server.log.read_bytes():
            with server.log.open("ab") as log:
                log.write(os.read(reader, 4096))
        server.wait_ready()
        os.close(reader)
        for _ in range(2):  # a word is said about each death and each return
            victim = server.worker("colocated")
            psutil.Process(victim["pid"]).kill()
            server.wait_recovered(victim)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        answer = HTTP.post(f"{server.url}/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert server.stop(signal.SIGTERM) == 0

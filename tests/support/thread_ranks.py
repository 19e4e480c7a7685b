"""Ranks of a tensor parallel engine as threads of one process: the same code, which then starts in no time."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.engine.tensor_parallel import follower, team
from tandem.engine.tensor_parallel.messages import RankFailed
from tandem.protocol.fault_boundary import error_of


class _ThreadFollower(team._Follower):
    """A follower without a process of its own."""

    def __init__(self, rank: int, store: int) -> None:
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.error: Exception | None = None
        self.connection = Connection(ours.detach())
        self._theirs = Connection(theirs.detach())
        self._thread = threading.Thread(target=self._run, args=(f"/proc/self/fd/{store}",))
        self.process: Any = SimpleNamespace(pid=0, poll=lambda: None)
        self._thread.start()

    def _run(self, store: str) -> None:
        error = error_of(follower._follow, self._theirs, store)
        if error is not None and not isinstance(error, EOFError | ConnectionError):
            self.error = error
            error_of(self._theirs.send, RankFailed(f"{type(error).__name__}: {error}"))
        self._theirs.close()

    def close(self) -> None:
        self.connection.close()
        self._thread.join(30.0)
        assert not self._thread.is_alive(), "a rank did not end"


@contextmanager
def thread_ranks() -> Iterator[None]:
    """Engines that are made in this block have their ranks as threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "_Follower", _ThreadFollower)
        yield

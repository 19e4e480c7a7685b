"""An event that other threads set, and that a poller waits for beside its sockets."""

from __future__ import annotations

import contextlib
import os
import threading


class Waker:
    """Readable from `set` until `clear`. Threads that outlive it may still call `set`."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        """For a poller."""
        return self._descriptor

    def set(self) -> None:
        """Wake who waits. Safe from any thread."""
        with self._lock:  # the number of a closed descriptor may be that of another file
            if not self._is_closed:
                os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Look at the cause after this call, not before it: then none is missed."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if not self._is_closed:
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Stop polling it first. Closing twice is fine."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._descriptor)

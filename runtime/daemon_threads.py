"""Blocking calls of a library that may never return, in threads that nothing waits for at the end of the process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from tandem.protocol.fault_boundary import error_of


def in_daemon_thread(call: Callable[[], object]) -> Future[None]:
    """Begin a call in a thread of its own. The future ends with it, or fails with the exception that it raises.

    asyncio's threads do not serve for this: a process that ends waits for them.
    """
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled from now on: the call goes on anyway

    def run() -> None:
        error = error_of(call)
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future

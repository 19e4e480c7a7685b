"""Work on the text of a request: in its tenant's turn, counted for its API key, only while its client is connected."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.request_options import key_use_of, tenant_of
from tandem.text.tokenizer import TokenizerPool, is_short

T = TypeVar("T")


async def work_on_text(
    request: Request, pool: TokenizerPool, work: Callable[[], T], num_bytes: int, *, is_encoding: bool = True
) -> T:
    """Result of `work` that takes as long as encoding a text of this size may. The request's body must have been read.

    The key is charged for the text, or unless the work `is_encoding` for the time that it took. Raises
    `ClientDisconnected` if the client leaves while the work waits for a thread.
    """
    use, cpu_s = key_use_of(request), 0.0
    if use is not None and is_encoding:
        use.note_text(num_bytes)

    def timed() -> T:
        nonlocal cpu_s
        began = time.thread_time()
        try:
            return work()
        finally:
            cpu_s = time.thread_time() - began

    try:
        if is_short(num_bytes):  # done at once, so nobody can leave meanwhile
            return timed()
        async with cancel_on_disconnect(request.receive):
            return await pool.run(timed, tenant=tenant_of(request), num_bytes=num_bytes)
    finally:
        if use is not None and not is_encoding:
            use.note_cpu(cpu_s)

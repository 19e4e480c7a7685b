"""Work on the text of a request: in its tenant's turn, counted for its API key, only while its client is connected."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from tandem.frontend.http.disconnect import cancel_on_disconnect
from tandem.frontend.http.request_options import key_use_of, tenant_of
from tandem.text.tokenizer import TokenizerPool, is_short

T = TypeVar("T")


async def work_on_text(request: Request, pool: TokenizerPool, work: Callable[[], T], num_bytes: int) -> T:
    """Result of `work` on a text of this size. The request's body must have been read.

    Raises `ClientDisconnected` if the client leaves while the work waits for a thread.
    """
    if (use := key_use_of(request)) is not None:
        use.note_text(num_bytes)
    if is_short(num_bytes):  # done at once, so nobody can leave meanwhile
        return work()
    async with cancel_on_disconnect(request.receive):
        return await pool.run(work, tenant=tenant_of(request), num_bytes=num_bytes)

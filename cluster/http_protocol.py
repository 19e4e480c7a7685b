"""uvicorn's HTTP protocol, with a way past ASGI for the tokens of a stream."""

from __future__ import annotations

from functools import partial

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from router.openai.outlet import DIRECT_WRITE

__all__ = ["HttpProtocol"]


class HttpProtocol(HttpToolsProtocol):
    """Offers requests the extension that `Outlet` uses."""

    def on_headers_complete(self) -> None:
        """The head of a request is there. NOTE: its task is made here, but begins in the loop's next turn."""
        super().on_headers_complete()
        self.scope["extensions"] = {DIRECT_WRITE: {"write": partial(_write, self.cycle)}}


def _write(cycle: RequestResponseCycle, data: bytes) -> bool:
    """Write a part of a response's body now, or return False: then `send` must do it, and wait if need be."""
    if not cycle.chunked_encoding or cycle.response_complete or cycle.flow.write_paused or cycle.disconnected:
        return False
    if data:  # an empty chunk would be the end of the body
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True

"""Looks at an engine: small GETs, each with a deadline and a bound on the answer, whatever the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import httpx

from tandem.runtime.idle_timeout import answered_in_time

__all__ = ["Resolve", "look", "looking_client"]

MAX_ANSWER_BYTES = 8 * 1024 * 1024  # of a health check, `/metrics` or the list of models

Resolve = Callable[[str, int], Awaitable[list[str]]]  # numeric addresses of a host; raises `OSError`


def looking_client(url: str, headers: Mapping[str, str], resolve: Resolve | None) -> httpx.AsyncClient:
    """A client of one engine. With `resolve` it connects to what that gives for the engine's name."""
    return httpx.AsyncClient(
        base_url=url,
        headers={**headers, "accept-encoding": "identity"},
        transport=_Transport(resolve),
        follow_redirects=False,
        trust_env=False,
    )


async def look(client: httpx.AsyncClient, path: str, timeout_s: float) -> httpx.Response:
    """The engine's whole answer. Raises `httpx.HTTPError` for one that is late, too large or none."""
    # Without a timer of httpx: where it was this process that stood still, all of them are over at once.
    asking = asyncio.create_task(client.get(path, timeout=None))
    try:
        if not await answered_in_time(asking, timeout_s):
            raise httpx.ReadTimeout(f"no whole answer within {timeout_s:g} s")
        return asking.result()
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, resolve: Resolve | None) -> None:
        self._resolve = resolve
        # Shorter than the 5 s after which uvicorn closes an idle connection, which would lose the request on it.
        self._inner = httpx.AsyncHTTPTransport(limits=httpx.Limits(keepalive_expiry=2.0), trust_env=False)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._resolve is not None:
            host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
            try:
                address, *_ = await self._resolve(host, port)
            except OSError as exc:
                raise httpx.ConnectError(str(exc), request=request) from exc
            request.url = request.url.copy_with(host=address)  # its Host header is set already
            request.extensions = {**request.extensions, "sni_hostname": host}
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream), "the transport is asynchronous"
        response.headers.pop("content-encoding", None)  # none was asked for, and one can unpack to any size
        response.stream = _Bounded(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Bounded(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._stream:
            num_bytes += len(part)
            if num_bytes > MAX_ANSWER_BYTES:
                raise httpx.ReadError(f"its answer is larger than {MAX_ANSWER_BYTES} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()

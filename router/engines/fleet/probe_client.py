"""HTTP for probes of one engine: small requests, each with a deadline and a bound on its answer."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from tandem.router.engines.addresses import Resolve
from tandem.runtime.followed_tls import FollowedTls
from tandem.runtime.idle_timeout import answered_in_time

__all__ = ["ProbeClient"]

MAX_ANSWER_BYTES = 8 * 1024 * 1024  # answer to a health check, `/metrics` or the list of models


class ProbeClient:
    """Asks one engine. Used from one event loop only."""

    def __init__(
        self, url: str, headers: Mapping[str, str], resolve: Resolve | None, tls: FollowedTls | None = None
    ) -> None:
        """`resolve` gives the addresses that the host may be connected at; None = any that its name has.

        `tls` is given for https:// only.
        """
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={**headers, "accept-encoding": "identity"},
            transport=_Transport(resolve, tls),
            follow_redirects=False,
            trust_env=False,
        )

    async def get(self, path: str, timeout_s: float) -> httpx.Response:
        """The engine's whole answer. Raises `httpx.HTTPError` if it is late, too large or missing."""
        return await self.send("GET", path, None, timeout_s)

    async def send(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> httpx.Response:
        """As `get`, by any method, with a body as JSON."""
        # httpx's own timers would all expire at once after a pause of this process itself.
        request = asyncio.create_task(self._client.request(method, path, json=body, timeout=None))
        try:
            if not await answered_in_time(request, timeout_s):
                raise httpx.ReadTimeout(f"no whole answer within {timeout_s:g} s")
            return request.result()
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, resolve: Resolve | None, tls: FollowedTls | None) -> None:
        self._resolve = resolve
        self._tls = tls
        self._context = None if tls is None else tls.loaded.context
        self._inner = _inner_transport(self._context)
        self._former: httpx.AsyncHTTPTransport | None = None  # probes may still use it

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._resolve is not None:
            host, port = request.url.host, request.url.port or (443 if request.url.scheme == "https" else 80)
            try:
                address, *_ = await self._resolve(host, port)
            except OSError as exc:
                raise httpx.ConnectError(str(exc), request=request) from exc
            request.url = request.url.copy_with(host=address)  # its Host header is set already
            request.extensions = {**request.extensions, "sni_hostname": host}
        if self._tls is not None and (context := await self._tls.current()) is not self._context:
            former, self._former = self._former, self._inner
            self._context, self._inner = context, _inner_transport(context)
            if former is not None:
                await former.aclose()
        response = await self._inner.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream), "the transport is asynchronous"
        response.headers.pop("content-encoding", None)  # we asked for none, and it could unpack to any size
        response.stream = _BoundedStream(response.stream)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()
        if self._former is not None:
            await self._former.aclose()


def _inner_transport(context: ssl.SSLContext | None) -> httpx.AsyncHTTPTransport:
    # Shorter than the 5 s after which uvicorn closes an idle connection, which would lose the request on it.
    limits = httpx.Limits(keepalive_expiry=2.0)
    return httpx.AsyncHTTPTransport(verify=context or True, limits=limits, trust_env=False)


class _BoundedStream(httpx.AsyncByteStream):
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

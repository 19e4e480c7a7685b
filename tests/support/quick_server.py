"""The HTTP server without the pauses of a tenth of a second that uvicorn makes while it serves and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn.server

from tandem.frontend.http import server as http_server_module
from tandem.frontend.http.server import HttpServer

_PAUSE_S = 0.005


class _QuickAsyncio:
    """asyncio as uvicorn's server sees it: the same with short pauses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(min(delay, _PAUSE_S))


@asynccontextmanager
async def http_server(*args: Any, **options: Any) -> AsyncIterator[HttpServer]:
    """As ours. It looks for clients that are too slow, as it does at every tenth pause, twenty times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.server, "asyncio", _QuickAsyncio())
        async with http_server_module.http_server(*args, **options) as server:
            yield server

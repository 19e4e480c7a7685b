"""The connections of this process to all engines of the fleet, and what their errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType

from typing_extensions import override

from tandem.protocol.config import ExternalEnginesConfig
from tandem.router.engines.addresses import public_addresses
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.dispatcher import EngineListener
from tandem.router.engines.errors import AnswerRefused, EngineFailed
from tandem.router.engines.tls import engine_tls
from tandem.router.engines.upstream import AnswerTooLarge, Unreachable, Upstream
from tandem.runtime.time_slicer import TimeSlicer

# For one iteration of the event loop: long enough for the tokens of a hundred streams, short beside a token's time.
RELAY_BUDGET_S = 0.004


class EngineConnection:
    """One engine, and the connections to it."""

    def __init__(self, spec: EngineSpec, upstream: Upstream) -> None:
        self.spec = spec
        self.upstream = upstream

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.spec.name


class EngineConnections(EngineListener):
    """Connections by the name of the engine. It listens to the fleet, so it has one for each engine."""

    def __init__(self, config: ExternalEnginesConfig) -> None:
        self._config = config
        self._connections: dict[str, EngineConnection] = {}
        self._slicer = TimeSlicer(budget_s=RELAY_BUDGET_S)

    def __getitem__(self, name: str) -> EngineConnection:
        connection = self._connections.get(name)
        if connection is None:  # it was removed after the request was placed
            raise EngineFailed(name, "it was removed")
        return connection

    @override
    def engine_added(self, spec: EngineSpec, *, is_trusted: bool) -> None:
        """Make the connection. Raises `ConfigError` when the engine's key or a file for TLS is missing."""
        resolve = None if is_trusted else public_addresses
        upstream = Upstream(
            spec.url,
            spec.request_headers(),
            connect_timeout_s=self._config.connect_timeout_s,
            slicer=self._slicer,
            resolve=resolve,
            tls=engine_tls(spec, self._config),
        )
        self._connections[spec.name] = EngineConnection(spec, upstream)

    @override
    def engine_removed(self, name: str) -> None:
        """Close the connections; requests that wait for an answer fail."""
        self._connections.pop(name).upstream.close()

    def close(self) -> None:
        """Close all connections. The fleet may live on and go on reporting its engines."""
        for connection in self._connections.values():
            connection.upstream.close()


class engine_errors:  # used like a function of contextlib; a generator costs three times as much
    """`with engine_errors(name):` translates errors of an HTTP request into `EngineFailed` with the engine's name."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, AnswerTooLarge):
            raise AnswerRefused(f"engine {self._engine}: {exc}") from exc
        if isinstance(exc, Unreachable):
            raise EngineFailed(self._engine, f"cannot be reached ({_text(exc)})", is_absent=True) from exc
        if isinstance(exc, OSError):
            raise EngineFailed(self._engine, f"broke the connection ({_text(exc)})", is_lost=True) from exc


@asynccontextmanager
async def in_time(timeout_s: float, late: EngineFailed) -> AsyncIterator[None]:
    """`engine_errors`, and `late` for work that takes longer than `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            with engine_errors(late.engine):
                yield
    except TimeoutError as exc:
        raise late from exc


def _text(exc: Exception) -> str:
    return str(exc) or type(exc).__name__

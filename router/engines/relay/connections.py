"""The connections to all engines that this process relays requests to."""

from __future__ import annotations

from tandem.router.engines.addresses import public_addresses
from tandem.router.engines.config import EngineSpec
from tandem.router.engines.errors import EngineFailed
from tandem.router.engines.relay.upstream import Upstream

__all__ = ["EngineConnection", "EngineConnections"]


class EngineConnection:
    """How requests get to one engine."""

    def __init__(self, spec: EngineSpec, upstream: Upstream) -> None:
        self.spec = spec
        self.upstream = upstream

    @property
    def name(self) -> str:
        """The engine's name."""
        return self.spec.name


class EngineConnections:
    """As many engines as the fleet has: it is the fleet's `EngineListener`."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._connections: dict[str, EngineConnection] = {}

    def __getitem__(self, name: str) -> EngineConnection:
        connection = self._connections.get(name)
        if connection is None:  # since a moment ago, when a request was placed on it
            raise EngineFailed(name, "it was removed")
        return connection

    def engine_added(self, spec: EngineSpec, *, is_trusted: bool) -> None:
        """Be ready to connect to it. Raises `ConfigError` when its key is not set."""
        resolve = None if is_trusted else public_addresses
        upstream = Upstream(
            spec.url, spec.request_headers(), connect_timeout_s=self._connect_timeout_s, resolve=resolve
        )
        self._connections[spec.name] = EngineConnection(spec, upstream)

    def engine_removed(self, name: str) -> None:
        """Close the connections to it; what waits for an answer fails."""
        self._connections.pop(name).upstream.close()

    def close(self) -> None:
        """Close all connections."""
        for name in list(self._connections):
            self.engine_removed(name)

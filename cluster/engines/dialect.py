"""The engines whose servers Tandem can start. Each is a module with the same functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from tandem.cluster.engines import sglang, vllm
from tandem.cluster.engines.server import EngineServer, Parallelism, Sockets
from tandem.protocol.config import TierConfig
from tandem.protocol.config.managed import EngineKindName


class Dialect(Protocol):
    """How the servers of one engine are started."""

    def check(self, arguments: Sequence[str]) -> None:
        """Raise `ConfigError` for flags that Tandem sets itself."""

    def check_tiers(self, tiers: TierConfig, *, has_gpus: bool) -> None:
        """Raise `ConfigError` for tiers that its servers cannot have."""

    def parallelism(self, arguments: Sequence[str]) -> Parallelism:
        """The ranks that these flags ask for. Raises `ConfigError`."""

    def command(self, server: EngineServer, sockets: Sockets) -> list[str]:
        """The command line of a server."""

    def release(self, sockets: Sockets) -> None:
        """Remove names of shared memory that would outlive the server: it serves, so its processes no longer need them.

        Called when it serves, and when it has ended.
        """

    def config(self, server: EngineServer) -> str:
        """Text of the file that the server gets as `--config`; "" for none."""

    def first_request(self, server: EngineServer) -> dict[str, Any]:
        """Further fields of the request that shows that the server generates."""

    def fixed_role(self, server: EngineServer) -> str:
        """Why the server cannot change its role while it runs; "" if it can."""

    def environment(self, server: EngineServer, sockets: Sockets) -> dict[str, str]:
        """Variables of the server, on top of those that it inherits."""

    def remedy(self, reason: str) -> str:
        """What to do about a server that ended for this reason, as the end of a sentence; "" if that is not known."""

    def defaults(self, server: EngineServer) -> dict[str, str]:
        """Variables that a user may set otherwise."""


_DIALECTS = {"vllm": cast(Dialect, vllm), "sglang": cast(Dialect, sglang)}


def dialect_of(kind: EngineKindName) -> Dialect:
    """The module of an engine."""
    return _DIALECTS[kind]

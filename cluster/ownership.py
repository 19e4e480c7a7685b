"""Which server looks after a worker that outlives it. Pure: the caller passes the time.

On a joined Ray cluster a worker is not its server's child. A server holds a worker by a lease that it renews. Once the
lease has run out, another server may claim the worker, for example the same one, started again after a crash. If none
does in time, the worker ends.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.protocol.config import ClusterConfig
from tandem.protocol.errors import WorkerError

RENEW_S = 2.0
LEASE_S = 8.0


class Place(NamedTuple):
    """A bundle of one of Ray's placement groups."""

    group: str  # its id
    bundle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A server, as its workers and other servers know it."""

    service: str  # servers of one name look for the same workers
    orphan_timeout_s: float
    name: str = field(default_factory=lambda: f"pid {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})")

    @property
    def namespace(self) -> str:
        """Ray's namespace in which its workers have names."""
        return f"tandem/{self.service}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """What a worker that may outlive its server has to know."""

    owner: Owner
    place: Place
    is_added: bool  # whether it came later, beside those that the configuration names


def owner_of(config: ClusterConfig) -> Owner | None:
    """The owner of the workers of this server; None if they end with it, as on a private Ray."""
    if not (config.ray_address and config.orphan_timeout_s):
        return None
    return Owner(service=config.service_name, orphan_timeout_s=config.orphan_timeout_s)


class Ownership:
    """The lease by which a server holds one worker. Used from several threads."""

    def __init__(self, owner: str, now: float) -> None:
        self._owner = owner
        self._expires_s = now + LEASE_S
        self._is_over = False
        self._lock = threading.Lock()

    def claim(self, owner: str, now: float) -> str:
        """Give the worker to `owner`. If another one holds it, returns that one's name instead.

        Raises `WorkerError` if the worker is about to end.
        """
        with self._lock:
            if self._is_over:
                raise WorkerError("it ends, as no server asked for it in time")
            if self._owner != owner and now < self._expires_s:
                return self._owner
            self._owner, self._expires_s = owner, now + LEASE_S
            return ""

    def renew(self, owner: str, now: float) -> bool:
        """Prolong the lease. Returns False if the worker now belongs to another owner."""
        with self._lock:
            if self._owner != owner:
                return False
            self._expires_s = now + LEASE_S
            return True

    def is_of(self, owner: str) -> bool:
        """Whether nobody else has claimed the worker since."""
        return self._owner == owner

    def orphaned_s(self, now: float) -> float:
        """How long nobody has held it; negative while somebody does."""
        return now - self._expires_s

    def end(self, timeout_s: float, now: float) -> bool:
        """End the ownership if nobody has held the worker for this long. Returns whether; nobody can claim it then."""
        with self._lock:
            self._is_over = self._is_over or self.orphaned_s(now) >= timeout_s
            return self._is_over

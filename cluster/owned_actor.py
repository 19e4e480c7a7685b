"""The part of a worker's actor that lets it outlive its server and be taken over by another one."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from tandem.cluster.ownership import Ownership, Place, Tenure
from tandem.cluster.process_end import ProcessIdentity, own_identity
from tandem.protocol.fault_boundary import error_of
from tandem.protocol.messages import WIRE_VERSION, Role

__all__ = ["OwnedActor", "Survivor", "WorkerClaim"]

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerClaim:
    """A worker that was claimed."""

    process: ProcessIdentity
    place: Place
    is_added: bool
    role: Role
    config: Any  # what it was started with
    started: Any  # what its `start` returned; None if it has not, and cannot be taken over
    wire_version: int = WIRE_VERSION


class Survivor(NamedTuple):
    """A worker that another server started, and this one has claimed."""

    actor: Any
    claim: WorkerClaim


class OwnedActor(ABC):
    """Base of actors. Methods run on Ray's threads."""

    def __init__(self, tenure: Tenure | None) -> None:
        """Without a tenure, Ray ends the actor with its server."""
        self._tenure = tenure
        self._ownership: Ownership | None = None
        if tenure is not None:
            self._ownership = Ownership(tenure.owner.name, time.monotonic())
            threading.Thread(target=self._end_when_orphaned, args=(tenure,), name="ownership", daemon=True).start()

    def identity(self) -> ProcessIdentity:
        """Which process this is."""
        return own_identity(ray.get_runtime_context().get_node_id())

    def renew(self, owner: str) -> bool:
        """Prolong the owner's lease; False if this worker is another server's by now."""
        assert self._ownership is not None, "it may outlive its server"
        return self._ownership.renew(owner, time.monotonic())

    def claim(self, owner: str, router_key: str) -> WorkerClaim | str:
        """Serve this owner from now on, unless another one holds the worker: then that one's name."""
        assert self._ownership is not None, "it may outlive its server"
        assert self._tenure is not None, "it may outlive its server"
        if holder := self._ownership.claim(owner, time.monotonic()):
            return holder
        config, started, role = self._obey(router_key)
        return WorkerClaim(
            process=self.identity(),
            place=self._tenure.place,
            is_added=self._tenure.is_added,
            role=role,
            config=config,
            started=started,
        )

    @abstractmethod
    def _obey(self, router_key: str) -> tuple[Any, Any, Role]:
        """Serve another router, whose key this is. Returns the worker's config, what `start` returned, and its role."""

    @abstractmethod
    def stop(self) -> None:
        """End the worker and wait for it."""

    def _is_left_by(self, owner: str) -> bool:
        """Whether another server has claimed the worker since `owner` did."""
        return self._ownership is not None and not self._ownership.is_of(owner)

    def _end_when_orphaned(self, tenure: Tenure) -> None:
        """End this process, and give back what Ray reserves for the service, once nobody has held it for too long.

        A server that comes back claims every worker of the service or kills it, so all that are left end together.
        """
        assert self._ownership is not None, "it may outlive its server"
        timeout_s = tenure.owner.orphan_timeout_s
        while self._ownership.orphaned_s(time.monotonic()) < timeout_s:
            time.sleep(_LOOK_S)
        logger.warning("no server has asked for this worker for %g s (orphan_timeout_s): it ends", timeout_s)
        if (error := error_of(self.stop)) is not None:  # its process ends all the same
            logger.warning("it did not stop in good order: %s", error)
        with suppress(RayError, ValueError):
            if (group := ray.util.get_current_placement_group()) is not None:
                remove_placement_group(group)
        os._exit(0)

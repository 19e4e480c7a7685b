"""The part of a worker's actor that lets it outlive its server, be taken over by another one, and leave at SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import remove_placement_group

from tandem.cluster.node_requests import withdraw_left_request
from tandem.cluster.ownership import LeaseTerms, Ownership, Place
from tandem.cluster.process_end import ProcessIdentity, own_identity
from tandem.protocol.fault_boundary import noted_on_error
from tandem.protocol.messages import WIRE_VERSION, Role

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # how often a blocking `watch` looks for news
_LOOK_S = 1.0
_ASK_TIMEOUT_S = 2.0
_UNHEARD_S = 10.0  # how long a SIGTERM waits for a server to hear of it: a living server watches


class WatchNews(Enum):
    """What `watch` returns for a worker that has not ended."""

    ASKED_TO_LEAVE = "it got SIGTERM"
    CLAIMED = "another server has claimed it"  # ends the `watch` of a dead server, which would block a thread forever


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerClaim:
    """A worker that was claimed."""

    process: ProcessIdentity
    place: Place
    is_added: bool
    role: Role
    config: Any  # what it was started with
    started: Any  # what its `start` returned; None if it has not returned: then it cannot be taken over
    wire_version: int = WIRE_VERSION


class OrphanedWorker(NamedTuple):
    """A worker that another server left, and this one has claimed."""

    actor: Any
    claim: WorkerClaim


class OwnedActor(ABC):
    """Base class of the actors. Methods run on Ray's threads."""

    def __init__(self, terms: LeaseTerms | None) -> None:
        """Without terms, Ray ends the actor with its server."""
        self._is_asked_to_leave = False
        self._has_news = threading.Event()  # set while no server has heard of the SIGTERM
        self._unheard: threading.Timer | None = None
        if ray.is_initialized():  # in an actor's process, whose main thread makes the actor
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self._terms = terms
        self._ownership: Ownership | None = None
        if terms is not None:
            self._ownership = Ownership(terms.owner.name, time.monotonic())
            threading.Thread(target=self._end_when_orphaned, args=(terms,), name="ownership", daemon=True).start()

    def identity(self) -> ProcessIdentity:
        """Which process this is."""
        return own_identity(ray.get_runtime_context().get_node_id())

    def renew(self, owner: str) -> bool:
        """Prolong the owner's lease. Returns False if this worker now belongs to another server."""
        assert self._ownership is not None, "it may outlive its server"
        return self._ownership.renew(owner, time.monotonic())

    def claim(self, owner: str, router_key: str) -> WorkerClaim | str:
        """Serve this owner from now on. If another one holds the worker, returns that one's name instead."""
        assert self._ownership is not None, "it may outlive its server"
        assert self._terms is not None, "it may outlive its server"
        if holder := self._ownership.claim(owner, time.monotonic()):
            return holder
        if self._is_asked_to_leave:  # the server that heard of it is dead
            self._tell_of_sigterm()
        config, started, role = self._obey(router_key)
        return WorkerClaim(
            process=self.identity(),
            place=self._terms.place,
            is_added=self._terms.is_added,
            role=role,
            config=config,
            started=started,
        )

    def is_held(self) -> bool:
        """Whether a server that lives looks after this worker."""
        assert self._ownership is not None, "it may outlive its server"
        return self._ownership.orphaned_s(time.monotonic()) < 0

    @abstractmethod
    def _obey(self, router_key: str) -> tuple[Any, Any, Role]:
        """Serve another router, whose key this is. Returns the worker's config, what `start` returned, and its role."""

    @abstractmethod
    def stop(self) -> None:
        """End the worker and wait for it."""

    def _news(self, owner: str) -> WatchNews | None:
        """What the watching server should know about a worker that goes on running."""
        if self._ownership is not None and not self._ownership.is_of(owner):
            return WatchNews.CLAIMED
        if self._has_news.is_set():
            self._has_news.clear()
            return WatchNews.ASKED_TO_LEAVE
        return None

    def _on_sigterm(self, *_: object) -> None:
        """Let the server drain this worker. End at once on a second SIGTERM, or if no server reacts in time."""
        if self._is_asked_to_leave:
            os._exit(1)
        self._is_asked_to_leave = True
        self._tell_of_sigterm()

    def _tell_of_sigterm(self) -> None:
        self._has_news.set()
        if self._unheard is not None:
            self._unheard.cancel()
        self._unheard = threading.Timer(_UNHEARD_S, self._end_if_unheard)
        self._unheard.daemon = True
        self._unheard.start()

    def _end_if_unheard(self) -> None:
        if self._has_news.is_set():
            os._exit(1)

    def _end_when_orphaned(self, terms: LeaseTerms) -> None:
        """Once nobody has held the worker for too long, end this process, and return the service's bundles to Ray."""
        assert self._ownership is not None, "it may outlive its server"
        timeout_s, service = terms.owner.orphan_timeout_s, terms.owner.service
        while not self._ownership.end(timeout_s, time.monotonic()):
            time.sleep(_LOOK_S)
        logger.warning("no server has asked for this worker for %g s (orphan_timeout_s): it ends", timeout_s)
        with ExitStack() as stack:  # whatever fails, the last entered first
            stack.callback(os._exit, 0)
            stack.callback(_return_bundles, terms.owner.namespace, service)
            stack.enter_context(noted_on_error(partial(logger.warning, "it did not stop in good order: %s")))
            self.stop()


def _return_bundles(namespace: str, service: str) -> None:
    """Return a service's bundles to Ray if no server holds one of its workers. Those workers end within seconds."""
    with suppress(RayError, ValueError):
        group = ray.util.get_current_placement_group()
        if group is not None and not _is_any_held(namespace):
            withdraw_left_request(service)
            remove_placement_group(group)


def names_in(namespace: str) -> list[str]:
    """The names of the actors in a namespace of Ray."""
    actors: list[dict[str, str]] = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == namespace]


def _is_any_held(namespace: str) -> bool:
    """Whether a server looks after one of a service's workers. One that does not answer is not held."""
    for name in names_in(namespace):
        with suppress(RayError, ValueError):  # it has ended meanwhile, or is late
            if ray.get(ray.get_actor(name, namespace=namespace).is_held.remote(), timeout=_ASK_TIMEOUT_S):
                return True
    return False

"""Replaces workers whose lost writes keep blocks of their peers in quarantine: the end of their process is proof."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

from ray.exceptions import RayError

from tandem.cluster.member import Member, first_line
from tandem.protocol.errors import ServingError
from tandem.protocol.messages import WorkerState
from tandem.scheduling.workers.registry import Registry

__all__ = ["watch_quarantines"]

logger = logging.getLogger(__name__)

# A sender is replaced when its lost writes keep this share of a peer's pool in quarantine for this long.
_MAX_QUARANTINED_SHARE = 0.05
_QUARANTINE_S = 60.0
_LOOK_S = 5.0


async def watch_quarantines(members: Collection[Member], registry: Registry, kill: Callable[[Member], None]) -> None:
    """Look at what the workers report every few seconds, for ever; `kill` ends the process of one that is replaced."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for sender in _senders_to_replace(members, registry):
            await _replace(sender, registry, kill)


def _senders_to_replace(members: Collection[Member], registry: Registry) -> list[Member]:
    """Members whose lost writes take too much of a peer's pool, where no transport can prove that they are over."""
    up = {
        (address.worker_id, address.epoch): member
        for member in members
        if member.is_up.is_set() and (address := member.address) is not None
    }
    found = [
        up.get((quarantine.sender_id, quarantine.sender_epoch))
        for worker in registry
        for quarantine in worker.quarantines
        if quarantine.oldest_s >= _QUARANTINE_S
        and quarantine.num_blocks >= _MAX_QUARANTINED_SHARE * worker.card.num_blocks
    ]
    return list(dict.fromkeys(member for member in found if member is not None))


async def _replace(member: Member, registry: Registry, kill: Callable[[Member], None]) -> None:
    """Let a worker finish its requests, then end it; the supervisor starts a new one."""
    address = member.address
    logger.warning("%s is replaced: its lost writes keep too many blocks of its peers in quarantine", member.worker_id)
    registry.set_state(member.worker_id, WorkerState.DRAINING, "its lost writes keep blocks in quarantine")
    try:
        await member.finish(await member.running())
    except (RayError, ServingError, TimeoutError) as exc:
        logger.warning("%s is replaced before it has finished: %s", member.worker_id, first_line(exc))
    if member.address == address:
        kill(member)

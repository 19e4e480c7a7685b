"""Restarts workers whose unconfirmed writes keep peers' blocks quarantined: only their exit proves that none lands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from tandem.cluster.draining import Drains
from tandem.cluster.member import Member
from tandem.protocol.errors import DrainRefused
from tandem.scheduling.workers.registry import Registry

logger = logging.getLogger(__name__)

# A sender is replaced when its lost writes keep this share of a peer's pool in quarantine for this long.
_MAX_QUARANTINED_SHARE = 0.05
_QUARANTINE_S = 60.0
_LOOK_S = 5.0
_GRACE_S = 120.0
_REASON = "its lost writes keep too many blocks of its peers in quarantine"


async def watch_quarantines(members: Collection[Member], registry: Registry, drains: Drains) -> None:
    """Look at what the workers report every few seconds, forever."""
    while True:
        await asyncio.sleep(_LOOK_S)
        for sender in _senders_to_replace(members, registry):
            with contextlib.suppress(DrainRefused):  # it is leaving already, or is asked again in a moment
                drains.begin(sender.worker_id, _GRACE_S, restart=True, reason=_REASON)
                logger.warning("%s is replaced: %s", sender.worker_id, _REASON)


def _senders_to_replace(members: Collection[Member], registry: Registry) -> list[Member]:
    """Members whose lost writes take too much of a peer's pool, where no transport can prove that they are over."""
    up = {address.process: member for member in members if member.is_up and (address := member.address) is not None}
    found = [
        up.get(quarantine.sender)
        for worker in registry
        for quarantine in worker.quarantines
        if quarantine.oldest_s >= _QUARANTINE_S
        and quarantine.num_blocks >= _MAX_QUARANTINED_SHARE * worker.card.num_blocks
    ]
    return list(dict.fromkeys(member for member in found if member is not None))

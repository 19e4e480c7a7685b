"""Routes messages between workers about handoffs to a role or a link."""

from __future__ import annotations

import logging

from tandem.decode_worker.role import DecodeRole
from tandem.kv_transfer.links import LinkChange, LinkState, PeerLinks
from tandem.prefill_worker.role import PrefillRole
from tandem.protocol.messages import (
    Heartbeat,
    LeaseClosed,
    LeaseGrant,
    LeaseQueued,
    LeaseRefused,
    LeaseRequest,
    LeaseRevoked,
    Message,
    PeerHello,
    PeerRefused,
    WriteBegun,
)

logger = logging.getLogger(__name__)


class HandoffMessages:
    """Hands messages about handoffs to the roles of one worker and to its links."""

    def __init__(self, links: PeerLinks, prefill: PrefillRole, decode: DecodeRole) -> None:
        self._links = links
        self._prefill = prefill
        self._decode = decode

    def take(self, message: Message, now: float) -> bool:
        """Handle a message. Returns False if it is about something else."""
        match message:
            case Heartbeat():
                self._decode.heartbeat(message.sender, message.handoffs, now)
            case LeaseRequest():
                self._links.remember(message.sender)
                self._decode.requested(message, now)
            case LeaseGrant():
                self._links.remember(message.sender)
                self._prefill.granted(message, now)
            case LeaseQueued():
                self._prefill.queued(message, now)
            case LeaseRefused():
                self._prefill.refused(message)
            case LeaseRevoked():
                self._prefill.revoked(message)
            case LeaseClosed():
                self._decode.closed(message)
            case WriteBegun():
                self._decode.last_begun = now
            case PeerHello():
                self.link_changed(self._links.hello(message), now)
            case PeerRefused():
                self.link_changed(self._links.refused(message), now)
            case _:
                return False
        return True

    def link_changed(self, change: LinkChange | None, now: float) -> None:
        """Let handoffs use a link that is up, or fail over one that the peer refused."""
        if change is None:
            return
        if change.state is LinkState.READY:
            self._prefill.link_ready(change.peer, now)
        else:
            logger.warning("%s", change.reason)
            self._prefill.link_refused(change.peer, change.reason)

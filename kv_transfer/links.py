"""Links between workers: addresses, the handshake, and messages to peers. Sockets are behind `send`.

The worker that will write opens the link: it sends a `PeerHello` that holds only the fields that must agree. The other
side compares them. If they agree it describes its memory in a `PeerHello` of its own; otherwise it answers
`PeerRefused` with the names of the differing fields. Their values are logged by the side that compared, and sent in no
message.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tandem.kv_transfer.handshake import differences, differing_fields
from tandem.kv_transfer.transport.base import Transport
from tandem.kv_transfer.wire_codec import WireCodec
from tandem.protocol.errors import TransferError
from tandem.protocol.messages import Message, PeerAddress, PeerHello, PeerRefused, WorkerEpoch

logger = logging.getLogger(__name__)


class LinkState(enum.Enum):
    """Whether a peer may be written to."""

    CONNECTING = enum.auto()
    READY = enum.auto()
    REFUSED = enum.auto()


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A link came up, or was refused (then `reason` says why)."""

    peer: PeerAddress
    state: LinkState
    reason: str = ""


@dataclass(eq=False, slots=True)
class _PeerLink:
    peer: PeerAddress
    state: LinkState
    deadline: float
    reason: str = ""
    unpack_block_s: float | None = None  # None: it takes no packed blocks, or of another codec


class PeerLinks:
    """The links that this worker opened, one per peer, each for one epoch of that peer."""

    def __init__(
        self,
        me: PeerAddress,
        compatibility: dict[str, str],
        transport: Transport,
        send: Callable[[PeerAddress, Message], None],
        *,
        timeout_s: float,
        wire: WireCodec | None = None,
    ) -> None:
        """`wire` unpacks blocks that peers pack; None: it takes none of them."""
        self.me = me
        self._wire = wire
        self._compatibility = compatibility
        self._transport = transport
        self._send = send
        self._timeout_s = timeout_s
        self._links: dict[str, _PeerLink] = {}
        self._known: dict[WorkerEpoch, PeerAddress] = {}

    def connect(self, peer: PeerAddress, now: float) -> None:
        """Open the link to this epoch of the peer unless it is open or opening. A refused link is tried again.

        An epoch older than the link's changes nothing: that process is gone, and so is its endpoint.
        """
        link = self._links.get(peer.worker_id)
        if link is not None and link.peer.epoch > peer.epoch:
            return
        if link is not None and link.peer.epoch == peer.epoch and link.state is not LinkState.REFUSED:
            return
        self._links[peer.worker_id] = _PeerLink(peer, LinkState.CONNECTING, now + self._timeout_s)
        self.remember(peer)
        self._send(peer, PeerHello(sender=self.me, compatibility=self._compatibility))

    def remember(self, peer: PeerAddress) -> None:
        """Learn the address of this epoch of a peer."""
        self._known[peer.process] = peer

    def is_ready(self, peer: PeerAddress) -> bool:
        """Whether this epoch of the peer may be written to."""
        link = self._links.get(peer.worker_id)
        return link is not None and link.peer.epoch == peer.epoch and link.state is LinkState.READY

    def unpack_block_s(self, peer: PeerAddress) -> float | None:
        """Seconds that a peer needs to unpack a block, as it said when the link opened; None: pack none for it."""
        return self._links[peer.worker_id].unpack_block_s if self.is_ready(peer) else None

    def send(self, process: WorkerEpoch, message: Message) -> None:
        """Send to that process, unless it was forgotten."""
        peer = self._known.get(process)
        if peer is not None:
            self._send(peer, message)

    def hello(self, message: PeerHello) -> LinkChange | None:
        """Handle a `PeerHello`: answer one that opens a link, or bring up the link that this one answers."""
        self.remember(message.sender)
        difference = differing_fields(self._compatibility, message.compatibility)
        if difference:
            values = differences(self._compatibility, message.compatibility)
            logger.warning("no link with %s: %s", message.sender.worker_id, values)
        if message.is_reply:
            return self._answered(message, difference)
        if difference:
            self._send(message.sender, PeerRefused(sender=self.me, reason=difference))
            return None
        reply = PeerHello(
            sender=self.me,
            compatibility=self._compatibility,
            transport_metadata=self._transport.local_metadata(),
            is_reply=True,
            wire_codec=self._wire.name if self._wire is not None else "",
            unpack_block_s=self._wire.unpack_block_s if self._wire is not None else 0.0,
        )
        self._send(message.sender, reply)
        return None

    def refused(self, message: PeerRefused) -> LinkChange | None:
        """Handle a `PeerRefused`."""
        link = self._links.get(message.sender.worker_id)
        if link is None or link.peer.epoch != message.sender.epoch:
            return None
        return self._refuse(link, f"the two differ in {message.reason}")

    def expire(self, now: float) -> list[LinkChange]:
        """Give up links whose peer did not answer in time. Repeat the hello to the others: a message may get lost.

        Call it about once a second.
        """
        opening = [link for link in self._links.values() if link.state is LinkState.CONNECTING]
        late = [link for link in opening if now >= link.deadline]
        for link in opening:
            if now < link.deadline:
                self._send(link.peer, PeerHello(sender=self.me, compatibility=self._compatibility))
        return [self._refuse(link, f"{link.peer.worker_id} did not answer in {self._timeout_s} s") for link in late]

    def broke(self, process: WorkerEpoch) -> None:
        """The transport lost this peer, which may be alive: the next `connect` opens the link again."""
        link = self._links.get(process.worker_id)
        if link is not None and link.peer.process == process and link.state is LinkState.READY:
            del self._links[process.worker_id]

    def reset(self, process: WorkerEpoch) -> None:
        """Close a link on which nothing moves; its open transfers become LOST. The next `connect` opens it again."""
        link = self._links.get(process.worker_id)
        if link is not None and link.peer.process == process and link.state is LinkState.READY:
            del self._links[process.worker_id]
            self._transport.remove_peer(process.worker_id)

    def reopen(self, process: WorkerEpoch, now: float) -> None:
        """Open the link to this process, unless it was forgotten. Call it about once a second."""
        peer = self._known.get(process)
        if peer is not None:
            self.connect(peer, now)

    def forget(self, process: WorkerEpoch) -> None:
        """That process is dead: drop its link; its open writes become LOST."""
        self._known.pop(process, None)
        link = self._links.get(process.worker_id)
        if link is not None and link.peer.process == process:
            del self._links[process.worker_id]
            self._transport.remove_peer(process.worker_id)

    def _answered(self, message: PeerHello, difference: str) -> LinkChange | None:
        link = self._links.get(message.sender.worker_id)
        if link is None or link.peer.epoch != message.sender.epoch or link.state is not LinkState.CONNECTING:
            return None
        if difference:
            return self._refuse(link, f"the two differ in {difference}")
        try:
            self._transport.add_peer(link.peer.worker_id, link.peer.epoch, message.transport_metadata)
        except TransferError as exc:
            return self._refuse(link, exc.message)
        link.state = LinkState.READY
        if self._wire is not None and message.wire_codec == self._wire.name:
            link.unpack_block_s = message.unpack_block_s
        return LinkChange(link.peer, LinkState.READY)

    def _refuse(self, link: _PeerLink, reason: str) -> LinkChange:
        link.state, link.reason = LinkState.REFUSED, reason
        return LinkChange(link.peer, LinkState.REFUSED, f"{link.peer.worker_id} cannot be written to: {reason}")

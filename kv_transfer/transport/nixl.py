"""Transport over NIXL (UCX): one-sided writes and reads between processes and hosts, host memory or CUDA.

Between workers of one machine whose pools are in host memory UCX opens no port at all (see `one_machine`). Elsewhere
what it carries is neither encrypted nor authenticated: who can connect to UCX's port can write to the process' memory,
so that network must be trusted.

No progress thread: it would spin on most of a core per agent and halve the bandwidth of a small machine. The owner's
polls drive everything instead. What UCX does with that, measured between two processes of one host:

- The bytes move inside `write_blocks` and `read_blocks` (CMA, the interpreter lock is released). Where UCX has a port a
  write completes only after the receiver has polled: its flush is answered by the receiver's UCX worker. A read needs
  nothing of the peer.
- A transfer picks from descriptor lists of both pools that were prepared once, which takes 30 us where new lists take
  100 to 14,000 us. NIXL merges picks that follow each other on both sides, so they are given in order of block ids:
  64 MB as 8 KB blocks take 16 ms in one run, 65 ms block by block; from 256 KB on there is nothing to gain.
- Notifications of NIXL's own arrive in the order in which writes complete. So they are sent from here, when the
  writes before them are done, and carry a sequence number by which the receiver undoes any reordering on the way. A
  checksum covers number and notification.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from torch import Tensor
from typing_extensions import override

from tandem.kv_transfer.checksum import append_checksum, strip_checksum
from tandem.kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferState,
    Transport,
    check_block_ids,
    is_loopback,
    pool_shape,
)
from tandem.kv_transfer.transport.one_machine import (
    UCX_TLS,
    Mailbox,
    MailboxAddress,
    MailboxSender,
    can_copy_between_processes,
)
from tandem.protocol.decoding import safe_decoder
from tandem.protocol.errors import ConfigError, IncompatiblePeer, PeerLost, TransferError

__all__ = ["NixlTransport"]

logger = logging.getLogger(__name__)


def _import_nixl() -> tuple[Any, Any]:
    """NIXL's API and bindings. Importing it turns off `logging.raiseExceptions` for everyone; that is undone."""
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _api, _bindings
    except ImportError as exc:
        raise ConfigError(
            f"transport='nixl' cannot be loaded ({exc}); pip install 'tandem-serve[worker]' or choose another"
        ) from exc
    finally:
        logging.raiseExceptions = raise_exceptions
    logging.getLogger("nixl").setLevel(logging.WARNING)  # at INFO it prints to stdout
    return _api, _bindings


_api, _bindings = _import_nixl()
_PEER_ERRORS = (
    _bindings.nixlRemoteDisconnectError,
    _bindings.nixlCancelledError,
    _bindings.nixlBackendError,  # what UCX says of a peer that cannot be reached
)
_NIXL_ERRORS = tuple(
    value for name, value in vars(_bindings).items() if name.startswith("nixl") and name.endswith("Error")
)  # they have no base class of their own

_MAX_AGENT_NAME = 2048
# Notifications of a link that wait for one before them, and their bytes: what is missing by then will not come.
_MAX_EARLY = 1024
_MAX_EARLY_BYTES = 16 << 20
_MAX_AHEAD = 1 << 16  # numbers: one further ahead is no sender's next
_MAX_INBOXES = 1024  # UCX takes notifications from whoever can connect

_HEADER = struct.Struct("<QQ")  # link number of the sender, sequence number within the link


@contextmanager
def _nixl_errors(doing: str) -> Iterator[None]:
    """Translate NIXL's exceptions, the only place where they are known."""
    try:
        yield
    except _PEER_ERRORS as exc:
        raise PeerLost(f"{doing}: {type(exc).__name__} {exc}") from exc
    except _NIXL_ERRORS as exc:
        raise TransferError(f"{doing}: {type(exc).__name__} {exc}") from exc


class _NixlMetadata(msgspec.Struct, frozen=True, array_like=True):
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 20)]
    address: Annotated[int, Meta(ge=1)]
    device_id: Annotated[int, Meta(ge=0, lt=1024)]
    memory_type: Literal["DRAM", "VRAM"]
    num_blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]
    mailbox: MailboxAddress | None  # None: it takes notifications from UCX


_metadata_of = safe_decoder(_NixlMetadata)


class _NixlTransfer(Transfer):
    """A write or read and what has to happen when it is done. `handle` is None for a pure notification."""

    __slots__ = ("handle", "is_read", "notification", "worker_id")

    def __init__(self, worker_id: str, num_bytes: int, notification: bytes, *, is_read: bool) -> None:
        super().__init__(num_bytes)
        self.worker_id = worker_id
        self.is_read = is_read
        self.handle: Any | None = None
        self.notification = notification


@dataclass(eq=False, slots=True)
class _NixlPeer:
    worker_id: str
    epoch: int
    shape: PoolShape
    remote_blocks: Any  # NIXL's prepared list of the peer's whole pool; a transfer picks from it by index
    link: int
    mailbox: MailboxSender | None  # of its notifications, past UCX
    in_flight: deque[_NixlTransfer] = field(default_factory=deque)
    num_notifications: int = 0
    is_lost: bool = False


@dataclass(eq=False, slots=True)
class _Inbox:
    """Puts one link's notifications back in order."""

    link: int = 0
    next_sequence: int = 0
    num_damaged: int = 0  # each had a number that is, or will be, missing; of this link or of the one that comes
    early: dict[int, bytes] = field(default_factory=dict)
    num_early_bytes: int = 0
    num_dropped: int = 0  # damaged, missing, or of no sender

    def take(self, sealed: bytes) -> Iterator[bytes]:
        """Payloads that are due now that this message has come.

        One that was damaged is lost, and those behind it do not wait for it; nor do too many wait for any other.
        """
        message = strip_checksum(sealed)
        if message is None or len(message) < _HEADER.size:
            self.num_damaged += 1
            self.num_dropped += 1
        else:
            link, sequence = _HEADER.unpack_from(message)
            self._put(link, sequence, message[_HEADER.size :])
        while self.early:
            if (payload := self.early.pop(self.next_sequence, None)) is not None:
                self.num_early_bytes -= len(payload)
                self.next_sequence += 1
                yield payload
            elif self.num_damaged:
                self.num_damaged -= 1
                self.next_sequence += 1
            elif len(self.early) > _MAX_EARLY or self.num_early_bytes > _MAX_EARLY_BYTES:
                first = min(self.early)
                self.num_dropped += first - self.next_sequence
                self.next_sequence = first
            else:
                return

    def _put(self, link: int, sequence: int, payload: bytes) -> None:
        if link > self.link:  # the sender added us anew and counts from 0
            self.link, self.next_sequence, self.early, self.num_early_bytes = link, 0, {}, 0
        if link != self.link or sequence < self.next_sequence or sequence in self.early:
            return  # of an earlier link, or a repetition
        if sequence - self.next_sequence >= _MAX_AHEAD:
            self.num_dropped += 1
            return
        self.early[sequence] = payload
        self.num_early_bytes += len(payload)


class NixlTransport(Transport):
    """A NIXL agent around one pool. `host` is the address at which peers reach this machine.

    `mailbox` is an `ipc://` endpoint in a private folder, if all peers are on this machine and have theirs there.
    """

    def __init__(self, worker_id: str, epoch: int, pool: Tensor, host: str = "127.0.0.1", mailbox: str = "") -> None:
        self._shape = pool_shape(pool)
        self._pool = pool  # keeps the registered memory alive
        self._memory_type: Literal["DRAM", "VRAM"] = "VRAM" if pool.is_cuda else "DRAM"
        self._device_id = max(pool.get_device(), 0)  # -1 on the CPU
        self._peers: dict[str, _NixlPeer] = {}
        self._inboxes: dict[str, _Inbox] = {}  # by agent name
        self._links = itertools.count(1)
        self._stuck: list[_NixlTransfer] = []  # of lost links; NIXL could not cancel them yet
        self._is_closed = False
        name = _agent_name(worker_id, epoch)
        needs_no_port = bool(mailbox) and _needs_no_port(pool)
        if not needs_no_port and is_loopback(host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX would listen at every network interface
        with _nixl_errors("start of the NIXL agent"):
            self._agent: Any = _make_agent(name, needs_no_port)
            self._registration = self._agent.register_memory(pool)
            self._local_blocks = self._prepare_blocks(
                "NIXL_INIT_AGENT", self._shape, pool.data_ptr(), self._device_id, self._memory_type
            )
            self._agent_metadata: bytes = self._agent.get_agent_metadata()
        self._mailbox = Mailbox(mailbox, name) if needs_no_port else None

    @override
    def local_metadata(self) -> bytes:
        return msgspec.msgpack.encode(
            _NixlMetadata(
                self._agent_metadata,
                self._pool.data_ptr(),
                self._device_id,
                self._memory_type,
                *self._shape,
                self._mailbox.address if self._mailbox is not None else None,
            )
        )

    @override
    def add_peer(self, worker_id: str, epoch: int, metadata: bytes) -> None:
        if self._is_closed:
            raise PeerLost(f"{worker_id} cannot be added: this transport is closed")
        theirs = _decode_metadata(metadata)
        if theirs.block_bytes != self._shape.block_bytes:
            raise IncompatiblePeer(f"block_bytes: {self._shape.block_bytes} here, {theirs.block_bytes} at {worker_id}")
        known = self._peers.get(worker_id)
        if known is not None and known.epoch == epoch and not known.is_lost:
            return
        self.remove_peer(worker_id)
        shape = PoolShape(theirs.num_blocks, theirs.block_bytes)
        name = _agent_name(worker_id, epoch)
        mailbox = self._open_mailbox(worker_id, theirs.mailbox)
        with _closing_on_errors(mailbox), _nixl_errors(f"adding {name}"):
            found = self._agent.add_remote_agent(theirs.agent_metadata).decode()
            if found != name:
                self._agent.remove_remote_agent(found)
                raise TransferError(f"metadata of {name} describes {found}")
            self._agent.make_connection(name)  # the first write then does not pay for it
            remote_blocks = self._prepare_blocks(name, shape, theirs.address, theirs.device_id, theirs.memory_type)
        self._peers[worker_id] = _NixlPeer(worker_id, epoch, shape, remote_blocks, next(self._links), mailbox)
        # NOTE: an inbox outlives `remove_peer`, as the peer's own link to us goes on counting; only a restart ends it.
        for former in list(self._inboxes):
            if former != name and _worker_of(former)[0] == worker_id:
                del self._inboxes[former]

    @override
    def remove_peer(self, worker_id: str) -> None:
        peer = self._peers.pop(worker_id, None)
        if peer is None:
            return
        self._disconnect(peer)

    @override
    def is_quiet(self, worker_id: str) -> bool:
        """Between processes of one machine: once every copy is over, which NIXL then knows.

        Never elsewhere. NIXL cannot say what became of a transfer that it gave up: its release cancels what has not
        begun, and what lies in a network card or in the buffers of a TCP connection goes on without us. New keys for
        the receiver's memory would not end it either: UCX checks none over TCP.
        """
        return self._mailbox is not None and all(copy.worker_id != worker_id for copy in self._stuck)

    @override
    def write_blocks(
        self,
        worker_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes = b"",
    ) -> Transfer:
        return self._copy("WRITE", worker_id, local_block_ids, remote_block_ids, notification)

    @override
    def read_blocks(self, worker_id: str, remote_block_ids: Sequence[int], local_block_ids: Sequence[int]) -> Transfer:
        return self._copy("READ", worker_id, local_block_ids, remote_block_ids)

    @override
    def poll(self) -> list[Notification]:
        if self._is_closed:
            return []
        for peer in self._peers.values():
            try:
                if peer.in_flight:
                    _check_alive(peer)
                self._progress(peer)
            except TransferError as exc:
                self._lose(peer, exc)
        if self._stuck:
            self._release_stuck()
        if self._mailbox is not None:
            arrived = self._mailbox.take()
        else:
            with _nixl_errors("reading notifications"):
                arrived = self._agent.get_new_notifs()
        if not arrived:
            return []
        return [
            Notification(*_worker_of(name), payload)
            for name, messages in arrived.items()
            for payload in self._in_order(name, messages)
        ]

    def _in_order(self, name: str, messages: list[bytes]) -> Iterator[bytes]:
        """The payloads that are due of one agent. What is no worker's, or of one too many, is dropped."""
        inbox = self._inbox_of(name)
        if inbox is None:
            self._note_dropped(len(messages), name)
            return
        for message in messages:
            yield from inbox.take(message)
        self._note_dropped(inbox.num_dropped, name)
        inbox.num_dropped = 0

    def _inbox_of(self, name: str) -> _Inbox | None:
        """Nobody's whom we know makes room for another: who can connect can make up names without end."""
        inbox = self._inboxes.get(name)
        if inbox is None and _is_agent_name(name):
            worker_id, epoch = _worker_of(name)
            for former in [n for n in self._inboxes if _worker_of(n)[0] == worker_id and _worker_of(n)[1] < epoch]:
                del self._inboxes[former]
            if len(self._inboxes) < _MAX_INBOXES:
                inbox = self._inboxes[name] = _Inbox()
        return inbox

    def _note_dropped(self, count: int, name: str) -> None:
        if count:
            before, self.num_dropped = self.num_dropped, self.num_dropped + count
            if before.bit_length() < self.num_dropped.bit_length():  # at 1, 2, 4, ...: a flood must not fill a disk
                text = "dropped notifications of %r, as damaged, missing or of no worker; %d in all"
                logger.warning(text, name[:_MAX_AGENT_NAME], self.num_dropped)

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for worker_id in list(self._peers):
            self.remove_peer(worker_id)
        self._release_stuck()
        for copy in self._stuck:
            if not copy.is_settled:
                copy.settle(TransferState.LOST)
        try:
            with _nixl_errors("close of the NIXL agent"):
                self._local_blocks.release()
                self._agent.deregister_memory(self._registration)
        finally:
            self._agent = None  # the last reference: ends the agent, its sockets and its memory maps
            if self._mailbox is not None:
                self._mailbox.close()

    def _open_mailbox(self, worker_id: str, theirs: MailboxAddress | None) -> MailboxSender | None:
        if (theirs is None) != (self._mailbox is None):
            raise IncompatiblePeer(
                f"UCX has a port here or at {worker_id}, but not at both; is UCX_TLS set for one worker alone?"
            )
        return None if self._mailbox is None or theirs is None else self._mailbox.open(theirs)

    def _prepare_blocks(self, agent: str, shape: PoolShape, address: int, device_id: int, memory_type: str) -> Any:
        """NIXL's list of all blocks of a pool, given as one row: (address, length, device, stride, count)."""
        row = [address, shape.block_bytes, device_id, shape.block_bytes, shape.num_blocks]
        return self._agent.prep_xfer_dlist(agent, np.array([row], dtype=np.uint64), memory_type)

    def _copy(
        self,
        operation: str,
        worker_id: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
        notification: bytes = b"",
    ) -> Transfer:
        peer = self._peers.get(worker_id)
        if peer is None or peer.is_lost:
            raise PeerLost(f"{worker_id} is unknown or gone")
        check_block_ids(local_block_ids, remote_block_ids, self._shape, peer.shape, is_read=operation == "READ")
        num_bytes = len(local_block_ids) * self._shape.block_bytes
        copy = _NixlTransfer(worker_id, num_bytes, notification, is_read=operation == "READ")
        peer.in_flight.append(copy)
        try:
            _check_alive(peer)  # else its number may be another process' by now, and CMA knows only the number
            if local_block_ids:
                self._start(peer, copy, operation, local_block_ids, remote_block_ids)
            self._progress(peer)
        except TransferError as exc:  # it may have begun: its fate is that of the link
            self._lose(peer, exc)
        return copy

    def _start(
        self,
        peer: _NixlPeer,
        copy: _NixlTransfer,
        operation: str,
        local_block_ids: Sequence[int],
        remote_block_ids: Sequence[int],
    ) -> None:
        pairs = np.array([local_block_ids, remote_block_ids], dtype=np.int32)
        pairs = pairs[:, np.argsort(pairs[0], kind="stable")]
        with _nixl_errors(f"{operation} with {peer.worker_id}"):
            copy.handle = self._agent.make_prepped_xfer(
                operation, self._local_blocks, pairs[0], peer.remote_blocks, pairs[1]
            )
            self._agent.transfer(copy.handle)

    def _progress(self, peer: _NixlPeer) -> None:
        """Settle finished transfers, oldest first: a write's notification waits for those before it."""
        while peer.in_flight and self._try_finish(peer, peer.in_flight[0]):
            peer.in_flight.popleft().settle(TransferState.DONE)
            if peer.in_flight:
                peer.in_flight[0].begin()

    def _try_finish(self, peer: _NixlPeer, copy: _NixlTransfer) -> bool:
        """Whether it is done; if so its notification was sent."""
        with _nixl_errors(f"transfer with {peer.worker_id}"):
            if copy.handle is not None:
                state = self._agent.check_xfer_state(copy.handle)
                if state == "ERR":
                    raise TransferError(f"transfer with {peer.worker_id} failed")
                if state != "DONE":
                    return False
                copy.handle.release()
                copy.handle = None
            return not copy.notification or self._try_notify(peer, copy.notification)

    def _try_notify(self, peer: _NixlPeer, notification: bytes) -> bool:
        message = append_checksum(_HEADER.pack(peer.link, peer.num_notifications) + notification)
        if peer.mailbox is None:
            self._agent.send_notif(_agent_name(peer.worker_id, peer.epoch), message)
        elif not peer.mailbox.send(message):
            return False
        peer.num_notifications += 1
        return True

    def _lose(self, peer: _NixlPeer, reason: TransferError) -> None:
        logger.warning("link to %s epoch %d is lost: %s", peer.worker_id, peer.epoch, reason.message)
        self._disconnect(peer)

    def _disconnect(self, peer: _NixlPeer) -> None:
        """Let go of what NIXL holds for this peer and lose the transfers with it.

        A read that cannot be cancelled may still land in our pool: it is lost only once it can.
        """
        for copy in peer.in_flight:
            if not self._try_release(copy):
                self._stuck.append(copy)
            if copy.handle is None or not copy.is_read:
                copy.settle(TransferState.LOST)
        peer.in_flight.clear()
        if peer.is_lost:
            return
        peer.is_lost = True
        if peer.mailbox is not None:
            peer.mailbox.close()
        try:
            with _nixl_errors(f"removing {peer.worker_id}"):
                peer.remote_blocks.release()
                self._agent.remove_remote_agent(_agent_name(peer.worker_id, peer.epoch))
        except TransferError as exc:
            logger.warning("%s", exc.message)

    def _release_stuck(self) -> None:
        stuck, self._stuck = self._stuck, []
        for copy in stuck:
            if not self._try_release(copy):
                self._stuck.append(copy)
            elif not copy.is_settled:
                copy.settle(TransferState.LOST)

    def _try_release(self, copy: _NixlTransfer) -> bool:
        """Whether NIXL holds nothing for it any more."""
        if copy.handle is not None:
            # A copy between processes that has begun goes on after its release: it is waited for.
            if self._mailbox is not None and self._is_moving(copy.handle):
                return False
            try:
                with _nixl_errors("release of a transfer"):
                    copy.handle.release()
            except TransferError:
                return False
            copy.handle = None
        return True

    def _is_moving(self, handle: Any) -> bool:
        try:
            with _nixl_errors("state of a transfer"):
                return bool(self._agent.check_xfer_state(handle) == "PROC")
        except TransferError:  # it has failed, as its peer has died
            return False


def _needs_no_port(pool: Tensor) -> bool:
    """Whether UCX can reach peers of this machine without one. Tells a person why not."""
    if "UCX_TLS" in os.environ:
        reason = "UCX_TLS is set"
    elif pool.is_cuda:
        reason = "the KV pool is on a GPU"
    elif not can_copy_between_processes():
        reason = "process_vm_writev is not permitted here"
    else:
        return True
    logger.warning("UCX listens at a port, which it lets every process of this machine use: %s", reason)
    return False


def _make_agent(name: str, needs_no_port: bool) -> Any:
    agent = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    if not needs_no_port:
        agent.create_backend("UCX", {})
        return agent
    os.environ["UCX_TLS"] = UCX_TLS  # read when the backend is created, and by nobody else
    try:
        agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})  # it refuses CMA where it is to find the dead
    finally:
        del os.environ["UCX_TLS"]
    return agent


@contextmanager
def _closing_on_errors(mailbox: MailboxSender | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if mailbox is not None:
            mailbox.close()
        raise


def _check_alive(peer: _NixlPeer) -> None:
    if peer.mailbox is not None and peer.mailbox.is_dead:
        raise PeerLost(f"the process of {peer.worker_id} has ended")


def _agent_name(worker_id: str, epoch: int) -> str:
    """Unique over restarts, so that a new process is never taken for the old one."""
    return f"{worker_id}#{epoch}"


def _is_agent_name(name: str) -> bool:
    """Whether it is one of ours; UCX takes notifications from whoever can connect."""
    worker_id, _, epoch = name.rpartition("#")
    return bool(worker_id) and epoch.isdecimal() and len(name) <= _MAX_AGENT_NAME


def _worker_of(agent_name: str) -> tuple[str, int]:
    worker_id, _, epoch = agent_name.rpartition("#")
    return worker_id, int(epoch)


def _decode_metadata(metadata: bytes) -> _NixlMetadata:
    try:
        described: _NixlMetadata = _metadata_of(metadata)
    except msgspec.MsgspecError as exc:
        raise TransferError(f"transport metadata cannot be read: {exc}") from exc
    return described

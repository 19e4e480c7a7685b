"""Transport over NIXL (UCX): one-sided writes and reads between processes and hosts, host memory or CUDA.

Between workers of one machine UCX listens at the loopback interface alone. What it carries is neither encrypted nor
authenticated: who can connect to UCX's port can write to the process' memory, so that network must be trusted.

No progress thread: it would spin on most of a core per agent and halve the bandwidth of a small machine. The owner's
polls drive everything instead. What UCX does with that, measured between two processes of one host:

- The bytes move inside `write_blocks` and `read_blocks` (CMA, the interpreter lock is released). A write completes only
  after the receiver has polled: its flush is answered by the receiver's UCX worker. A read needs nothing of the peer.
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

from kv_transfer.checksum import seal, unseal
from kv_transfer.transport.base import (
    Notification,
    PoolShape,
    Transfer,
    TransferState,
    Transport,
    check_block_ids,
    is_loopback,
    pool_shape,
)
from protocol.decoding import safe_decoder
from protocol.errors import ConfigError, IncompatiblePeer, PeerLost, TransferError

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
_MAX_EARLY = 1 << 16  # notifications of a link that wait for one before them

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


class _Metadata(msgspec.Struct, frozen=True, array_like=True):
    agent_metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 20)]
    address: Annotated[int, Meta(ge=1)]
    device_id: Annotated[int, Meta(ge=0, lt=1024)]
    memory_type: Literal["DRAM", "VRAM"]
    num_blocks: Annotated[int, Meta(ge=1, lt=1 << 31)]
    block_bytes: Annotated[int, Meta(ge=1, lt=1 << 40)]


_metadata_of = safe_decoder(_Metadata)


class _Copy(Transfer):
    """A write or read and what has to happen when it is done. `handle` is None for a pure notification."""

    __slots__ = ("handle", "is_read", "notification")

    def __init__(self, num_bytes: int, notification: bytes, *, is_read: bool) -> None:
        super().__init__(num_bytes)
        self.is_read = is_read
        self.handle: Any | None = None
        self.notification = notification


@dataclass(eq=False, slots=True)
class _Peer:
    worker_id: str
    epoch: int
    shape: PoolShape
    remote_blocks: Any  # NIXL's prepared list of the peer's whole pool; a transfer picks from it by index
    link: int
    in_flight: deque[_Copy] = field(default_factory=deque)
    num_notifications: int = 0
    is_lost: bool = False


@dataclass(eq=False, slots=True)
class _Inbox:
    """Puts one link's notifications back in order."""

    link: int = 0
    next_sequence: int = 0
    num_damaged: int = 0  # each had a number that is, or will be, missing; of this link or of the one that comes
    early: dict[int, bytes] = field(default_factory=dict)

    def take(self, sealed: bytes) -> Iterator[bytes]:
        """Payloads that are due now that this message has come.

        One that was damaged is lost, and those behind it do not wait for it.
        """
        message = unseal(sealed)
        if message is None or len(message) < _HEADER.size:
            logger.warning("dropped a notification of %d bytes: it is not what a peer sent", len(sealed))
            self.num_damaged += 1
        else:
            link, sequence = _HEADER.unpack_from(message)
            self._put(link, sequence, message[_HEADER.size :])
        while self.early:
            if self.next_sequence in self.early:
                yield self.early.pop(self.next_sequence)
            elif self.num_damaged:
                self.num_damaged -= 1
            else:
                return
            self.next_sequence += 1

    def _put(self, link: int, sequence: int, payload: bytes) -> None:
        if link > self.link:  # the sender added us anew and counts from 0
            self.link, self.next_sequence, self.early = link, 0, {}
        if link == self.link and 0 <= sequence - self.next_sequence < _MAX_EARLY:
            self.early[sequence] = payload


class NixlTransport(Transport):
    """A NIXL agent around one pool. `host` is the address at which peers reach this machine."""

    def __init__(self, worker_id: str, epoch: int, pool: Tensor, host: str = "127.0.0.1") -> None:
        if is_loopback(host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")  # UCX would listen at every network interface
        self._shape = pool_shape(pool)
        self._pool = pool  # keeps the registered memory alive
        self._memory_type: Literal["DRAM", "VRAM"] = "VRAM" if pool.is_cuda else "DRAM"
        self._device_id = max(pool.get_device(), 0)  # -1 on the CPU
        self._peers: dict[str, _Peer] = {}
        self._inboxes: dict[str, _Inbox] = {}  # by agent name
        self._links = itertools.count(1)
        self._stuck: list[_Copy] = []  # of lost links; NIXL could not cancel them yet
        self._is_closed = False
        with _nixl_errors("start of the NIXL agent"):
            config = _api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = _api.nixl_agent(_agent_name(worker_id, epoch), config)
            self._registration = self._agent.register_memory(pool)
            self._local_blocks = self._prepare_blocks(
                "NIXL_INIT_AGENT", self._shape, pool.data_ptr(), self._device_id, self._memory_type
            )
            self._agent_metadata: bytes = self._agent.get_agent_metadata()

    @override
    def local_metadata(self) -> bytes:
        return msgspec.msgpack.encode(
            _Metadata(
                self._agent_metadata,
                self._pool.data_ptr(),
                self._device_id,
                self._memory_type,
                *self._shape,
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
        with _nixl_errors(f"adding {name}"):
            found = self._agent.add_remote_agent(theirs.agent_metadata).decode()
            if found != name:
                self._agent.remove_remote_agent(found)
                raise TransferError(f"metadata of {name} describes {found}")
            self._agent.make_connection(name)  # the first write then does not pay for it
            remote_blocks = self._prepare_blocks(name, shape, theirs.address, theirs.device_id, theirs.memory_type)
        self._peers[worker_id] = _Peer(worker_id, epoch, shape, remote_blocks, next(self._links))
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
        """Never. NIXL cannot say what became of a transfer that it gave up: its release cancels what has not begun,
        and what lies in a network card or in the buffers of a TCP connection goes on without us. New keys for the
        receiver's memory would not end it either: UCX checks none where it copies between processes or over TCP.
        """
        return False

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
                self._progress(peer)
            except TransferError as exc:
                self._lose(peer, exc)
        if self._stuck:
            self._release_stuck()
        with _nixl_errors("reading notifications"):
            arrived = self._agent.get_new_notifs()
        if not arrived:
            return []
        return [
            Notification(*_worker_of(name), payload)
            for name, messages in arrived.items()
            if _is_agent_name(name)
            for message in messages
            for payload in self._inboxes.setdefault(name, _Inbox()).take(message)
        ]

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
        copy = _Copy(len(local_block_ids) * self._shape.block_bytes, notification, is_read=operation == "READ")
        peer.in_flight.append(copy)
        try:
            if local_block_ids:
                self._start(peer, copy, operation, local_block_ids, remote_block_ids)
            self._progress(peer)
        except TransferError as exc:  # it may have begun: its fate is that of the link
            self._lose(peer, exc)
        return copy

    def _start(
        self,
        peer: _Peer,
        copy: _Copy,
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

    def _progress(self, peer: _Peer) -> None:
        """Settle finished transfers, oldest first: a write's notification waits for those before it."""
        while peer.in_flight and self._try_finish(peer, peer.in_flight[0]):
            peer.in_flight.popleft().settle(TransferState.DONE)
            if peer.in_flight:
                peer.in_flight[0].begin()

    def _try_finish(self, peer: _Peer, copy: _Copy) -> bool:
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
            if copy.notification:
                header = _HEADER.pack(peer.link, peer.num_notifications)
                self._agent.send_notif(_agent_name(peer.worker_id, peer.epoch), seal(header + copy.notification))
                peer.num_notifications += 1
        return True

    def _lose(self, peer: _Peer, reason: TransferError) -> None:
        logger.warning("link to %s epoch %d is lost: %s", peer.worker_id, peer.epoch, reason.message)
        self._disconnect(peer)

    def _disconnect(self, peer: _Peer) -> None:
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

    def _try_release(self, copy: _Copy) -> bool:
        """Whether NIXL holds nothing for it any more."""
        if copy.handle is not None:
            try:
                with _nixl_errors("release of a transfer"):
                    copy.handle.release()
            except TransferError:
                return False
            copy.handle = None
        return True


def _agent_name(worker_id: str, epoch: int) -> str:
    """Unique over restarts, so that a new process is never taken for the old one."""
    return f"{worker_id}#{epoch}"


def _is_agent_name(name: str) -> bool:
    """Whether it is one of ours; UCX takes notifications from whoever can connect."""
    worker_id, _, epoch = name.rpartition("#")
    if worker_id and epoch.isdecimal() and len(name) <= _MAX_AGENT_NAME:
        return True
    logger.warning("dropped notifications of %r: no worker is called so", name[:_MAX_AGENT_NAME])
    return False


def _worker_of(agent_name: str) -> tuple[str, int]:
    worker_id, _, epoch = agent_name.rpartition("#")
    return worker_id, int(epoch)


def _decode_metadata(metadata: bytes) -> _Metadata:
    try:
        described: _Metadata = _metadata_of(metadata)
    except msgspec.MsgspecError as exc:
        raise TransferError(f"transport metadata cannot be read: {exc}") from exc
    return described

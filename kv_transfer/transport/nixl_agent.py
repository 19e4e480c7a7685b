"""A NIXL agent around one block pool: the only module that knows NIXL's API, its exceptions and UCX's settings.

No progress thread: it would spin on most of a core per agent and halve the bandwidth of a small machine. Polls of the
owner drive everything instead.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from torch import Tensor

from tandem.kv_transfer.transport.base import PoolShape, is_loopback
from tandem.kv_transfer.transport.one_machine import UCX_TLS, can_copy_between_processes
from tandem.protocol.errors import ConfigError, PeerLost, TransferError

logger = logging.getLogger(__name__)

TransferHandle: TypeAlias = Any  # NIXL's, of one transfer
BlockList: TypeAlias = Any  # NIXL's prepared list of a whole pool; a transfer picks blocks from it by index


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
    _bindings.nixlBackendError,  # UCX's error for a peer that cannot be reached
)
_NIXL_ERRORS = tuple(
    value for name, value in vars(_bindings).items() if name.startswith("nixl") and name.endswith("Error")
)  # they have no common base class


@contextmanager
def _nixl_errors(doing: str) -> Iterator[None]:
    """Translate NIXL's exceptions."""
    try:
        yield
    except _PEER_ERRORS as exc:
        raise PeerLost(f"{doing}: {type(exc).__name__} {exc}") from exc
    except _NIXL_ERRORS as exc:
        raise TransferError(f"{doing}: {type(exc).__name__} {exc}") from exc


class ShardAddress(NamedTuple):
    """Where a shard of a pool begins."""

    address: int
    device_id: int


class PoolMemory(NamedTuple):
    """The location of a pool in its process."""

    shards: list[ShardAddress]
    memory_type: Literal["DRAM", "VRAM"]
    shape: PoolShape


class NixlAgent:
    """Its methods raise `PeerLost` and `TransferError` where NIXL raises its own exceptions."""

    def __init__(self, name: str, shards: Sequence[Tensor], shape: PoolShape, *, opens_port: bool, host: str) -> None:
        """With `opens_port` UCX listens at a TCP port: at the loopback interface only if `host` is loopback."""
        addresses = [ShardAddress(shard.data_ptr(), max(shard.get_device(), 0)) for shard in shards]  # -1 on the CPU
        self.memory = PoolMemory(addresses, "VRAM" if shards[0].is_cuda else "DRAM", shape)
        self._shards = shards  # keeps the registered memory alive
        for variable, value in ucx_defaults(
            is_on_gpu=shards[0].is_cuda, is_local=opens_port and is_loopback(host)
        ).items():
            os.environ.setdefault(variable, value)
        with _nixl_errors("start of the NIXL agent"):
            self._agent: Any = _make_agent(name, opens_port)
            regions = [[one.address, shard.nbytes, one.device_id] for one, shard in zip(addresses, shards, strict=True)]
            self._registration = self._agent.register_memory(np.array(regions, np.uint64), self.memory.memory_type)
            self._local_blocks = {shape.num_shards: self._prepare_blocks("NIXL_INIT_AGENT", self.memory, len(shards))}
            self.metadata: bytes = self._agent.get_agent_metadata()

    def connect(self, name: str, metadata: bytes, memory: PoolMemory, pieces: int) -> BlockList:
        """Connect to the agent of this name and prepare the list of its blocks, each cut into `pieces`."""
        with _nixl_errors(f"adding {name}"):
            found = self._agent.add_remote_agent(metadata).decode()
            if found != name:
                self._agent.remove_remote_agent(found)
                raise TransferError(f"metadata of {name} describes {found}")
            self._agent.make_connection(name)  # the first write then does not pay for it
            if pieces not in self._local_blocks:
                self._local_blocks[pieces] = self._prepare_blocks("NIXL_INIT_AGENT", self.memory, pieces)
            return self._prepare_blocks(name, memory, pieces)

    def disconnect(self, name: str, blocks: BlockList) -> None:
        """Undo `connect`."""
        with _nixl_errors(f"removing {name}"):
            blocks.release()
            self._agent.remove_remote_agent(name)

    def prepare(
        self, operation: str, local_ids: Sequence[int], remote: BlockList, remote_ids: Sequence[int], pieces: int
    ) -> TransferHandle:
        """The handle of a "WRITE" or "READ" between these pieces of both pools, paired in order."""
        pairs = np.array([local_ids, remote_ids], dtype=np.int32)
        pairs = pairs[:, np.argsort(pairs[0], kind="stable")]
        with _nixl_errors(operation):
            return self._agent.make_prepped_xfer(operation, self._local_blocks[pieces], pairs[0], remote, pairs[1])

    def begin(self, handle: TransferHandle) -> None:
        """Start the transfer. If this raises, it may have begun anyway."""
        with _nixl_errors("start of a transfer"):
            self._agent.transfer(handle)

    def try_finish(self, handle: TransferHandle) -> bool:
        """Whether the transfer is done; then it is released."""
        with _nixl_errors("transfer"):
            state = self._agent.check_xfer_state(handle)
            if state == "ERR":
                raise TransferError("transfer failed")
            if state != "DONE":
                return False
            handle.release()
        return True

    def is_moving(self, handle: TransferHandle) -> bool:
        """Whether bytes of the transfer are being copied."""
        try:
            with _nixl_errors("state of a transfer"):
                return bool(self._agent.check_xfer_state(handle) == "PROC")
        except TransferError:  # it has failed, because its peer has died
            return False

    def try_release(self, handle: TransferHandle) -> bool:
        """Cancel a transfer. False if NIXL cannot do so now."""
        try:
            with _nixl_errors("release of a transfer"):
                handle.release()
        except TransferError:
            return False
        return True

    def notify(self, name: str, message: bytes) -> None:
        """Send a notification to a connected agent."""
        with _nixl_errors("notification"):
            self._agent.send_notif(name, message)

    def take_notifications(self) -> dict[str, list[bytes]]:
        """What arrived since the last call, by the name of the sender. Drives UCX."""
        with _nixl_errors("reading notifications"):
            arrived: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return arrived

    def close(self) -> None:
        """End the agent, its sockets and its memory maps."""
        try:
            with _nixl_errors("close of the NIXL agent"):
                for blocks in self._local_blocks.values():
                    blocks.release()
                self._agent.deregister_memory(self._registration)
        finally:
            self._agent = None  # the last reference

    def _prepare_blocks(self, agent: str, memory: PoolMemory, pieces: int) -> BlockList:
        """NIXL's list of all pieces of a pool, given as a row a shard: (address, length, device, stride, count)."""
        num_bytes, count = memory.shape.block_bytes // pieces, memory.shape.num_blocks * pieces // len(memory.shards)
        rows = [[shard.address, num_bytes, shard.device_id, num_bytes, count] for shard in memory.shards]
        return self._agent.prep_xfer_dlist(agent, np.array(rows, dtype=np.uint64), memory.memory_type)


def ucx_defaults(*, is_on_gpu: bool, is_local: bool) -> dict[str, str]:
    """Environment variables for UCX that the user has not set, for a pool that is on a GPU or is not.

    `is_local` says that UCX listens at a port, for peers of this machine alone.
    """
    defaults = {}
    if is_local:
        defaults["UCX_NET_DEVICES"] = "lo"  # otherwise UCX listens at every network interface
    if is_on_gpu:  # without NVLink between GPUs, UCX reads another process's GPU memory over TCP: 0.5 GB/s, not 400
        defaults["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] = "on"
    return defaults


def needs_no_port(pool: Tensor) -> bool:
    """Whether UCX can reach peers of this machine without a port. Logs why not."""
    if "UCX_TLS" in os.environ:
        reason = "UCX_TLS is set"
    elif pool.is_cuda:
        reason = "the KV pool is on a GPU"
    elif not can_copy_between_processes():
        reason = "process_vm_writev is not permitted here"
    else:
        return True
    logger.warning("UCX listens at a port that every process of this machine can use: %s", reason)
    return False


def _make_agent(name: str, opens_port: bool) -> Any:
    agent = _api.nixl_agent(name, _api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    if opens_port:
        agent.create_backend("UCX", {})
        return agent
    os.environ["UCX_TLS"] = UCX_TLS  # read only when the backend is created
    try:
        # UCX refuses CMA if it has to detect dead peers.
        agent.create_backend("UCX", {"ucx_error_handling_mode": "none"})
    finally:
        del os.environ["UCX_TLS"]
    return agent

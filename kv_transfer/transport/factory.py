"""Creates a transport by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tandem.kv_transfer.transport.base import Transport
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.kv_transfer.transport.shards import shards_of
from tandem.protocol.errors import ConfigError


def create_transport(
    name: str,
    *,
    worker_id: str,
    epoch: int,
    pool: Tensor | Sequence[Tensor],
    hub: InProcessHub | None = None,
    host: str = "127.0.0.1",
    mailbox: str = "",
) -> Transport:
    """Transport of this name around `pool`, which must outlive it.

    `pool` is a contiguous tensor `[num_blocks, ...]`, or one such shard for each rank of this worker.
    `hub` connects `in_process` transports. `host` is the address at which peers reach this machine: if it is loopback,
    no transport listens anywhere else. `mailbox` is an `ipc://` endpoint in a folder that only this user may enter, and
    that holds the mailboxes of all peers: they are all on this machine, so `nixl` needs no port that others could
    reach.
    """
    if name not in _FACTORIES:
        raise ConfigError(f"transport={name!r} is unknown; choose one of {', '.join(sorted(_FACTORIES))}")
    return _FACTORIES[name](worker_id, epoch, shards_of(pool), hub, host, mailbox)


def _create_in_process(
    worker_id: str, epoch: int, shards: Sequence[Tensor], hub: InProcessHub | None, host: str, mailbox: str
) -> Transport:
    if hub is None:
        raise ConfigError("transport='in_process' needs the hub that joins the transports of this process")
    return hub.join(worker_id, epoch, shards)


def _create_nccl(
    worker_id: str, epoch: int, shards: Sequence[Tensor], hub: InProcessHub | None, host: str, mailbox: str
) -> Transport:
    from tandem.kv_transfer.transport.collective import CollectiveTransport

    return CollectiveTransport(worker_id, epoch, shards, host)


def _create_nixl(
    worker_id: str, epoch: int, shards: Sequence[Tensor], hub: InProcessHub | None, host: str, mailbox: str
) -> Transport:
    from tandem.kv_transfer.transport.nixl import NixlTransport

    return NixlTransport(worker_id, epoch, shards, host, mailbox)


_FACTORIES: dict[str, Callable[[str, int, Sequence[Tensor], InProcessHub | None, str, str], Transport]] = {
    "in_process": _create_in_process,
    "nccl": _create_nccl,
    "nixl": _create_nixl,
}

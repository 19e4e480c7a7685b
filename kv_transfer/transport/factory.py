"""Creates a transport by name: one of ours, or one that another package adds (`tandem.protocol.plugins`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.kv_transfer.transport.base import Transport
from tandem.kv_transfer.transport.in_process import InProcessHub
from tandem.kv_transfer.transport.shards import shards_of
from tandem.protocol.errors import ConfigError
from tandem.protocol.plugins import KV_TRANSPORTS


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
    reach. A transport of another package is made with the same arguments as `NixlTransport`. Raises `ConfigError`.
    """
    shards = shards_of(pool)
    if name == "in_process":
        if hub is None:
            raise ConfigError("transport='in_process' needs the hub that joins the transports of this process")
        return hub.join(worker_id, epoch, shards)
    setting = f"transport={name!r}"
    make = KV_TRANSPORTS.load(name, setting)
    transport: Transport = KV_TRANSPORTS.construct(
        name, setting, lambda: make(worker_id, epoch, shards, host=host, mailbox=mailbox)
    )
    return transport

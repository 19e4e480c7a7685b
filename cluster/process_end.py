"""Ends a worker's process and proves that it is gone.

Ray may say that an actor is dead while its process still exists: a stopped process was seen to last five seconds
longer. Such a process may go on writing into its peers' memory. So before blocks that it could write to are freed, the
kernel of its machine is asked. A pidfd names exactly that process, even if another gets its number later, and becomes
readable when its last thread has ended.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.protocol.process import ProcessId, has_ended, own_process
from tandem.runtime.backoff import Backoff

logger = logging.getLogger(__name__)

_LOOK_S = 5.0  # one wait for the end; then the kill is repeated
_GRACE_S = 1.0  # for Ray, which was told to end it: its raylet complains of a process that somebody else killed
_CALL_TIMEOUT_S = 30.0
# A node that Ray's head declared dead may be alive behind a broken network. Its raylet gives up within
# `gcs_rpc_server_reconnect_timeout_s` (60 s by default), and its workers end with it. This is twice as long.
_DEAD_NODE_S = 120.0


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Names one process among all that ever ran on all machines of a cluster."""

    node_id: str  # Ray's name of the node
    process: ProcessId


def own_identity(node_id: str) -> ProcessIdentity:
    """The identity of this process."""
    return ProcessIdentity(node_id, own_process())


def end_process(process: ProcessId, timeout_s: float = _LOOK_S) -> bool:
    """Kill a process of this machine and wait for its end. True means that it is gone: no thread of it will run.

    A stopped process ends too. Blocks for a second plus `timeout_s` at most.
    """
    if not process.is_here:
        return False
    descriptor = process.open()
    if descriptor is None:
        return True
    try:
        if has_ended(descriptor, min(_GRACE_S, timeout_s)):
            return True
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return has_ended(descriptor, timeout_s)
    except ProcessLookupError:
        return True
    finally:
        os.close(descriptor)


async def until_gone(
    identity: ProcessIdentity,
    *,
    end: Callable[[ProcessIdentity], Awaitable[bool]] | None = None,
    backoff: Backoff = Backoff(0.2, 10.0),
) -> None:
    """Kill a process on any node and return when it is certainly gone. May never return: there is no other proof.

    The one exception is a node that Ray calls dead: there Ray's own processes have ended after a known time. `end`
    tries once and returns whether the process is gone.
    """
    end = end or _end_once
    began_s = time.monotonic()
    for num_tries in itertools.count(1):
        if await end(identity):
            return
        logger.warning(
            "process %d of node %s is not known to be gone after %.1f s; what it may write to stays reserved",
            identity.process.pid,
            identity.node_id[:12],
            time.monotonic() - began_s,
        )
        await asyncio.sleep(backoff.pause_s(num_tries))


async def _end_once(identity: ProcessIdentity) -> bool:
    if identity.process.is_here:
        return await asyncio.to_thread(end_process, identity.process)
    strategy = NodeAffinitySchedulingStrategy(node_id=identity.node_id, soft=False)
    task = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    try:
        return bool(await asyncio.wait_for(task.remote(identity.process), _CALL_TIMEOUT_S))
    except (RayError, TimeoutError) as exc:
        logger.warning("node %s cannot be asked: %s", identity.node_id[:12], str(exc).partition("\n")[0])
    if await asyncio.to_thread(_is_node_alive, identity.node_id):
        return False
    await asyncio.sleep(_DEAD_NODE_S)
    return not await asyncio.to_thread(_is_node_alive, identity.node_id)


def _is_node_alive(node_id: str) -> bool:
    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())

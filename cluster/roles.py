"""Which workers a cluster starts with: their roles, names and ranks. Needs no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tandem.protocol.config import ClusterConfig
from tandem.protocol.messages import Role


def roles_of(config: ClusterConfig) -> list[Role]:
    """The roles with which the workers start."""
    return (
        [Role.COLOCATED]
        if config.colocated
        else [Role.PREFILL] * config.num_prefill + [Role.DECODE] * config.num_decode
    )


def worker_ids_of(roles: Sequence[Role]) -> list[str]:
    """A name for each worker: its role and number."""
    counts: Counter[Role] = Counter()
    names = []
    for role in roles:
        names.append(f"{role}-{counts[role]}")
        counts[role] += 1
    return names


def ranks_of(config: ClusterConfig, role: Role) -> int:
    """Ranks of a worker with our own engine that starts in this role."""
    engine = config.engine
    return (role is Role.DECODE and engine.decode_parallel_size) or engine.tensor_parallel_size

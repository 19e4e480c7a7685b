"""The simulated workers."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.loadtest.traces import TRACE_BLOCK_SIZE
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role, WorkerCard
from tandem.simulator.fleet import NAMESPACE, make_card
from tandem.simulator.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal machines: `num_prefill` and `num_decode` of them, or `num_decode` colocated ones if `num_prefill` is 0."""

    machine: Machine
    num_prefill: int
    num_decode: int
    host_cache_tokens: int = 0  # host memory of each worker
    peer_reads: bool = True  # whether a worker may read KV from another's pool, where the policy requests it

    def __post_init__(self) -> None:
        for name, least in (("num_prefill", 0), ("num_decode", 1), ("host_cache_tokens", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {least}")

    @property
    def num_workers(self) -> int:
        """Workers of both roles."""
        return self.num_prefill + self.num_decode

    @property
    def step_tokens(self) -> int:
        """Most tokens in one step."""
        return self.machine.step_tokens if self.num_prefill else self.machine.colocated_step_tokens

    def cards(self) -> list[WorkerCard]:
        """Every worker's description of itself."""
        if not self.num_prefill:
            return [self.card(f"w{idx}", Role.COLOCATED) for idx in range(self.num_decode)]
        prefill = [self.card(f"p{idx}", Role.PREFILL) for idx in range(self.num_prefill)]
        return prefill + [self.card(f"d{idx}", Role.DECODE) for idx in range(self.num_decode)]

    def card(self, worker_id: str, role: Role) -> WorkerCard:
        """A worker's description of itself."""
        return make_card(
            worker_id,
            role,
            kind=self.machine.kind,
            num_blocks=self.machine.pool_tokens // TRACE_BLOCK_SIZE,
            block_size=TRACE_BLOCK_SIZE,
            block_bytes=self.machine.block_bytes,
            max_num_batched_tokens=self.step_tokens,
            max_num_seqs=self.machine.max_num_seqs,
            namespace=NAMESPACE if self.peer_reads else worker_id.encode(),
        )

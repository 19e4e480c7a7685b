"""What a live server has learned about its steps, handoffs and tiers, taken from `/v1/pools`, and a plan made of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.errors import ConfigError
from tandem.protocol.load_prior import TIER_PRIORS, LoadPrior
from tandem.scheduling.cost_model import StepCosts, TransferCosts
from tandem.scheduling.planning.geometry import Geometry
from tandem.scheduling.planning.hardware import GPUS, Tier
from tandem.scheduling.planning.roofline import PlannedWorker, scaled

_LEAST_STEPS = 50

_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Count = Annotated[int, Meta(ge=0, le=1 << 60)]


class _Steps(msgspec.Struct):
    base_s: _Seconds
    prefill_token_s: _Seconds
    attention_s: _Seconds
    decode_seq_s: _Seconds
    kv_token_s: _Seconds
    num_measurements: _Count


class _Transfers(msgspec.Struct):
    latency_s: _Seconds
    byte_s: _Seconds
    num_measurements: _Count


class _Costs(msgspec.Struct):
    steps: dict[str, _Steps]
    transfers: dict[str, _Transfers]


class _LiveTier(msgspec.Struct):
    name: str
    latency_s: _Seconds = 0.0
    block_s: float | None = 0.0  # None: not reached now
    num_hits: _Count = 0


class _LiveWorker(msgspec.Struct):
    model: str
    kind: str
    block_size: Annotated[int, Meta(ge=1)]
    block_bytes: Annotated[int, Meta(ge=1)]
    num_blocks: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    max_num_batched_tokens: Annotated[int, Meta(ge=1)]
    tiers: list[_LiveTier] = []


class _Pools(msgspec.Struct):
    costs: _Costs
    roles: dict[str, list[_LiveWorker]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Costs of the kind of worker that the server knows best. Of engines behind `tandem route` no worker is known."""

    kind: str  # hardware, with " x N" for N tensor-parallel ranks
    costs: StepCosts
    num_steps: int
    link: TransferCosts | None  # None: no handoff was measured
    workers: Mapping[str, _LiveWorker]  # one of each role

    @property
    def model(self) -> str:
        """The served model; empty if it is not known."""
        return next((worker.model for worker in self.workers.values()), "")

    @property
    def num_gpus(self) -> int:
        """Tensor-parallel ranks of a worker."""
        ranks = re.search(r" x (\d+)$", self.kind)
        return int(ranks[1]) if ranks else 1

    @property
    def gpu_name(self) -> str:
        """The accelerator's name in the table, or empty."""
        words = re.findall(r"[a-z0-9]+", self.kind.lower())
        return next((name for name in GPUS if name in words), "")

    def tier_byte_s(self) -> dict[str, float]:
        """Learned seconds per byte of each tier that was loaded from."""
        return {
            tier.name: tier.block_s / worker.block_bytes
            for worker in self.workers.values()
            for tier in worker.tiers
            if tier.num_hits and tier.block_s
        }


def learned_from(body: bytes, url: str) -> Learned:
    """Reads the body of `/v1/pools`. Raises `ConfigError` if it is not Tandem's, or has learned too little."""
    try:
        pools = msgspec.json.decode(body, type=_Pools)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise ConfigError(
            f"from={url}: its /v1/pools is not that of this version of Tandem ({exc}); a server with API keys shows it "
            "to an operator's key only"
        ) from exc
    if not pools.costs.steps:
        raise ConfigError(f"from={url} has computed nothing yet; send it load first: tandem bench --url {url}")
    kind, steps = max(pools.costs.steps.items(), key=lambda item: item[1].num_measurements)
    if steps.num_measurements < _LEAST_STEPS:
        raise ConfigError(
            f"from={url} has learned from {steps.num_measurements} steps only, fewer than {_LEAST_STEPS}; send it load "
            f"first: tandem bench --url {url}"
        )
    links = [one for one in pools.costs.transfers.values() if one.num_measurements]
    link = max(links, key=lambda one: one.num_measurements, default=None)
    workers = {role: found for role, members in pools.roles.items() for found in members if found.kind == kind}
    return Learned(
        kind=kind,
        costs=StepCosts(*msgspec.structs.astuple(steps)[:5]),
        num_steps=steps.num_measurements,
        link=TransferCosts(link.latency_s, link.byte_s) if link else None,
        workers=workers,
    )


def live_worker(learned: Learned, geometry: Geometry, url: str) -> PlannedWorker:
    """The server's own worker, as it is. Raises `ConfigError` if the server does not say how large its pool is."""
    if not learned.workers:
        raise ConfigError(f"from={url} does not say how large its engines' pools are; give --gpu")
    one = next(iter(learned.workers.values()))
    byte_s = learned.tier_byte_s()
    tiers = {
        name: Tier(LoadPrior(prior.latency_s, 1 / byte_s[name] if name in byte_s else prior.bytes_per_s), 0.0)
        for name, prior in TIER_PRIORS.items()
    }
    chunks = {role: worker.max_num_batched_tokens for role, worker in learned.workers.items()}
    return PlannedWorker(
        geometry=geometry,
        num_gpus=learned.num_gpus,
        costs=learned.costs,
        tiers=tiers,
        link=learned.link or TransferCosts(3e-3, 1 / 2e9),
        pool_bytes=float(one.num_blocks * one.block_bytes),
        max_num_seqs=one.max_num_seqs,
        step_tokens=chunks.get("prefill", one.max_num_batched_tokens),
        colocated_step_tokens=chunks.get("colocated", one.max_num_batched_tokens),
        kv_token_bytes=max(one.block_bytes // one.block_size, 1),
    )


def calibrated(planned: PlannedWorker, live: PlannedWorker, learned: Learned) -> PlannedWorker:
    """A planned worker with costs as the live server has them, times the ratio of what data sheets say of both.

    `live` is the prediction for the live server's own model and accelerator.
    """
    byte_s = learned.tier_byte_s()
    tiers = {
        name: replace(
            tier,
            load=LoadPrior(
                tier.load.latency_s,
                tier.load.bytes_per_s / (byte_s[name] * live.tiers[name].load.bytes_per_s)
                if name in byte_s
                else tier.load.bytes_per_s,
            ),
        )
        for name, tier in planned.tiers.items()
    }
    link = planned.link
    if learned.link is not None:
        link = TransferCosts(learned.link.latency_s, link.byte_s * learned.link.byte_s / live.link.byte_s)
    return replace(planned, costs=scaled(learned.costs, live.costs, planned.costs), tiers=tiers, link=link)

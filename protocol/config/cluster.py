"""Configuration of everything that `tandem serve` starts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from tandem.protocol.config.managed import ManagedEngineConfig
from tandem.protocol.config.panels import DAY_S, WORKERS, NumWorkers, UnitsPerWorker
from tandem.protocol.config.router import RouterConfig
from tandem.protocol.config.worker import EngineConfig, TierConfig, TransferConfig
from tandem.protocol.settings import Setting, check_settings, require

_RAY_ADDRESS = re.compile(r"(ray://)?[^\s/:@]+:\d{1,5}|(ray://)?\[[0-9a-fA-F:.]+\]:\d{1,5}|auto")

_SERVICE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def _is_whole_or_share(value: float) -> bool:
    return value < 1 or value == int(value)


def _is_name(name: str) -> bool:
    return _SERVICE_NAME.fullmatch(name) is not None


def _is_ray_address(address: str) -> bool:
    return not address or _RAY_ADDRESS.fullmatch(address) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything that `tandem serve` starts."""

    engine: EngineConfig
    managed: ManagedEngineConfig = field(default_factory=ManagedEngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    num_prefill: Annotated[
        NumWorkers, Setting("Workers that start as prefill; short: --prefill.", WORKERS, short="--prefill")
    ] = 1
    num_decode: Annotated[
        NumWorkers, Setting("Workers that start as decode; short: --decode.", WORKERS, short="--decode")
    ] = 1
    colocated: Annotated[
        bool, Setting("One worker that does both, for small machines and for comparison.", WORKERS)
    ] = False
    autoscale: Annotated[
        bool, Setting("Move workers between prefill and decode by load; needs three or more.", WORKERS)
    ] = True
    min_workers: Annotated[
        NumWorkers,
        Setting("Fewest workers that the autoscaler may leave, two or more; 0 = it only suggests removals.", WORKERS),
    ] = 0
    max_workers: Annotated[
        NumWorkers,
        Setting("Most workers that the autoscaler may start; 0 = it only suggests additions.", WORKERS),
    ] = 0
    num_gpus_per_worker: Annotated[
        UnitsPerWorker,
        Setting(
            "GPUs that Ray reserves for each worker; 0 = one where there are enough; short: --gpus-per-worker.",
            WORKERS,
            short="--gpus-per-worker",
            is_valid=_is_whole_or_share,
            rule="a whole number or a share of one, from 0 to 4096",
        ),
    ] = 0.0
    num_cpus_per_worker: Annotated[
        UnitsPerWorker,
        Setting(
            "Cores for each worker; 0 = an even share of the machine's; short: --cpus-per-worker.",
            WORKERS,
            short="--cpus-per-worker",
            is_valid=_is_whole_or_share,
            rule="a whole number or a share of one, from 0 to 4096",
        ),
    ] = 0.0
    max_restarts: Annotated[
        int,
        Meta(ge=0, le=1000),
        Setting(
            "Restarts of one worker within 300 s of service; beyond them it is restarted only while others serve.",
            WORKERS,
        ),
    ] = 3
    ray_address: Annotated[
        str,
        Setting(
            "auto or host:port joins a running Ray cluster; empty = a private one on this machine.",
            WORKERS,
            is_valid=_is_ray_address,
            rule="host:port, ray://host:port or auto; leave it empty to start a private Ray",
        ),
    ] = ""
    service_name: Annotated[
        str,
        Setting(
            "On a joined Ray cluster: the name under which a restarted server finds its workers.",
            WORKERS,
            is_valid=_is_name,
            rule="1 to 64 letters, digits, dots, dashes and underscores",
        ),
    ] = "tandem"
    orphan_timeout_s: Annotated[
        float,
        Meta(ge=0, le=DAY_S),
        Setting(
            "On a joined Ray cluster: seconds that workers outlive a server that died; 0 = they end with it.", WORKERS
        ),
    ] = 300.0
    autoscale_interval_s: float = 2.0  # between two decisions of the autoscaler; no flag

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("num_prefill", "num_decode"):
            require(
                self.colocated or getattr(self, name) >= 1,
                f"{name}={getattr(self, name)} must be at least 1, or 0 with --colocated: one worker that does both",
            )
        self._check_bounds()
        heartbeat_s, timeout_s = self.transfer.heartbeat_interval_s, self.router.worker_timeout_s
        require(
            heartbeat_s * 2 <= timeout_s,
            f"worker_timeout_s={timeout_s} must be at least two heartbeats, which come every {heartbeat_s:g} s, "
            "or healthy workers would count as dead; raise it",
        )
        self._check_codecs()

    def _check_codecs(self) -> None:
        """Raise `ConfigError` if a codec could not pack the pool's KV: it has 8 bits already."""
        codecs = {"wire_codec": self.transfer.wire_codec} | {spec.setting: spec.codec for spec in self.tiers.specs}
        for setting, codec in codecs.items():
            require(
                self.engine.kv_cache_dtype == "auto" or codec in ("auto", "raw"),
                f"{setting}: codec {codec!r} does not pack KV of kv_cache_dtype='fp8'; use raw",
            )

    def _check_bounds(self) -> None:
        """Raise `ConfigError` if the autoscaler could not keep to its bounds."""
        least, most, num = self.min_workers, self.max_workers, self.num_prefill + self.num_decode
        if not (least or most):
            return
        bounds = f"min_workers={least} and max_workers={most}"
        require(not self.colocated, f"{bounds} are for prefill and decode workers; leave them out with colocated")
        require(self.autoscale, f"{bounds} are the autoscaler's, which is off; leave out autoscale=false")
        require(least != 1, "min_workers=1 must be at least 2: a prefill and a decode worker; 0 = none is removed")
        require(not most or least <= most, f"min_workers={least} must not be above max_workers={most}")
        started = f"num_prefill={self.num_prefill} + num_decode={self.num_decode}"
        require(least <= num, f"min_workers={least} must not be above {started}, which are started")
        require(not most or num <= most, f"max_workers={most} must not be below {started}, which are started")

"""Configuration of every component: one frozen dataclass each, each default written once, here.

Command-line flags, config fields and helm values share a name. Values are checked when a config is made; a bad one
raises `ConfigError` with the name, the value and the remedy.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role

__all__ = [
    "ClusterConfig",
    "EngineConfig",
    "RouterConfig",
    "TierConfig",
    "TransferConfig",
    "WorkerConfig",
    "cache_folder",
]

DType = Literal["auto", "float32", "bfloat16"]
Codec = Literal["raw", "fp8", "int8", "int4"]


_DAY_S = 86_400.0  # no wait of ours is longer
_MAX_UNITS = 4096  # cores or GPUs of one worker, and threads
_MAX_WORKERS = 1024
_MAX_GB = 1e6  # of one pool or tier
_MAX_COUNT = 2**24  # of tokens, sequences, pins, connections
_MAX_TTL_S = 366 * _DAY_S
_HOST = re.compile(r"\[[0-9a-fA-F:.]+\](:\d+)?|[^\s/:@*,\[\]]+(:\d+)?|[0-9a-fA-F:.]+")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([^\s/@*,\[\]]+|\[[0-9a-fA-F:.]+\](:\d+)?)")
_RAY_ADDRESS = re.compile(r"(ray://)?[^\s/:@]+:\d{1,5}|(ray://)?\[[0-9a-fA-F:.]+\]:\d{1,5}|auto")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_seconds(config: object, *names: str) -> None:
    """Raise ConfigError unless these fields are times: finite (nan is not), above 0 and at most a day."""
    for name in names:
        value = getattr(config, name)
        _require(0 < value <= _DAY_S, f"{name}={value} must be above 0 and at most {_DAY_S:.0f} seconds")


def _require_at_most(limit: float, config: object, *names: str) -> None:
    """Raise ConfigError for a field above the limit: more is a typing mistake, and would only fail much later."""
    for name in names:
        value = getattr(config, name)
        _require(value <= limit, f"{name}={value} must be at most {limit:.0f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One paged engine."""

    model: str  # local folder of a transformers model
    served_model_name: str = ""
    dtype: DType = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    block_size: int = 16
    pool_bytes: int = 0  # 0 = derive from free memory
    max_model_len: int = 0  # 0 = the model's own
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 0  # tokens of one step: the chunk size of prefill; 0 = by role and device
    num_threads: int = 0  # CPU threads of the step; 0 = leave to torch

    def __post_init__(self) -> None:
        _require(
            1 <= self.block_size <= 256 and self.block_size & (self.block_size - 1) == 0,
            f"block_size={self.block_size} must be a power of two from 1 to 256",
        )
        _require(self.pool_bytes >= 0, f"pool_bytes={self.pool_bytes} must not be negative")
        _require(
            self.max_model_len >= 0, f"max_model_len={self.max_model_len} must not be negative; 0 is the model's own"
        )
        _require(self.num_threads >= 0, f"num_threads={self.num_threads} must not be negative; 0 leaves it to torch")
        _require(self.max_num_seqs >= 1, f"max_num_seqs={self.max_num_seqs} must be at least 1")
        _require(
            self.max_num_batched_tokens == 0 or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than max_num_seqs={self.max_num_seqs}; "
            "raise it or lower max_num_seqs, so that every running sequence gets its token in each step",
        )
        _require_at_most(_MAX_COUNT, self, "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        _require_at_most(_MAX_GB * 1e9, self, "pool_bytes")
        _require_at_most(_MAX_UNITS, self, "num_threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Handoff of KV between two workers."""

    transport: Literal["nixl", "nccl", "in_process"] = "nixl"
    lease_ttl_s: float = 10.0  # extended by each heartbeat of the sender
    heartbeat_interval_s: float = 1.0
    handoff_timeout_s: float = 30.0  # longest wait for a grant, a peer's hello or a closed lease
    checksums: Literal["off", "sample", "all"] = "all"  # of KV blocks on their way to another worker

    def __post_init__(self) -> None:
        _require_seconds(self, "lease_ttl_s", "heartbeat_interval_s", "handoff_timeout_s")
        _require(
            0 < self.heartbeat_interval_s * 3 <= self.lease_ttl_s,
            f"lease_ttl_s={self.lease_ttl_s} must be at least three heartbeats ({self.heartbeat_interval_s} s each)",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """KV beyond the pool: host memory (L2), local disk (L3), object store (L4). A size of 0 or no path: not used."""

    host_cache_gb: float = 0.0  # of each worker; GB are 10^9 bytes
    host_cache_codec: Codec = "raw"
    disk_cache_path: str = ""  # a folder; workers of one host share it, and it is read again after a restart
    disk_cache_gb: float = 20.0
    disk_cache_codec: Codec = "raw"
    object_cache_url: str = ""  # s3://bucket/prefix, gs://, az://, file:///folder
    object_cache_gb: float = 1000.0
    object_cache_codec: Codec = "raw"
    kv_key_file: str = ""  # secret of disk and object store, equal on all hosts that share one; empty = each host's own
    eviction_policy: str = "hit-density"  # of every tier
    pin_share: float = 0.25  # of the pool and of each tier: what pins may keep from eviction

    def __post_init__(self) -> None:
        _require(0 <= self.pin_share <= 0.9, f"pin_share={self.pin_share} must be from 0 (no pins) to 0.9")
        for name in ("host_cache_gb", "disk_cache_gb", "object_cache_gb"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        _require_at_most(_MAX_GB, self, "host_cache_gb", "disk_cache_gb", "object_cache_gb")
        _require(
            not self.object_cache_url or "://" in self.object_cache_url,
            f"object_cache_url={self.object_cache_url!r} must be a URL such as s3://bucket/prefix or file:///folder",
        )

    @property
    def is_used(self) -> bool:
        """Whether there is any tier below the pool."""
        return bool(self.host_cache_gb or self.disk_cache_path or self.object_cache_url)

    @property
    def codec_identity(self) -> str:
        """What KV of this worker may have been through: part of its identity. "raw" if it comes back as it was."""
        used = {
            self.host_cache_codec if self.host_cache_gb else "raw",
            self.disk_cache_codec if self.disk_cache_path else "raw",
            self.object_cache_codec if self.object_cache_url else "raw",
        }
        return "+".join(sorted(used - {"raw"})) or "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker process: an engine plus a role."""

    worker_id: str
    role: Role
    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    host: str = "127.0.0.1"
    socket_folder: str = ""  # its sockets are files in this private folder; empty = TCP ports of `host`
    router_key: str = ""  # public key of the router that may connect; empty = nobody may
    cpu_cores: tuple[int, ...] = ()  # cores to pin to; empty = no pinning


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The HTTP edge and placement."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 * 1024 * 1024
    max_queued_prompt_tokens: int = 2_000_000  # waiting in router and workers; above it requests get 429
    max_worker_queue_s: float = 0.0  # predicted queue of a worker that gets no more prompts; 0 = by its steps
    local_prefill: bool = True  # a decode worker may compute a prompt itself where that is cheaper
    router_processes: int = 1  # that share the port; with several, all HTTP and text is theirs
    tokenizer_threads: int = 2  # of each router process
    worker_timeout_s: float = 8.0  # silence after which a worker counts as dead
    request_timeout_s: float = 600.0  # longest silence between two tokens of a request
    drain_timeout_s: float = 5.0  # wait for running streams when the server stops
    cors_allow_origins: tuple[str, ...] = ()  # web origins whose pages may call
    allowed_hosts: tuple[str, ...] = ()  # names in a Host header; on loopback its own names are allowed without
    max_connections: int = 2048  # open at once, of each router process
    max_header_bytes: int = 32 * 1024  # of a request's URL and header lines
    header_timeout_s: float = 10.0  # for a request's header to arrive
    body_timeout_s: float = 30.0  # for its body; a large one gets longer, by its size
    max_pins: int = 1024
    max_pins_per_tenant: int = 128
    pin_tenant_share: float = 0.5  # of the blocks that may be pinned: what one tenant's pins may cover
    max_pin_ttl_s: float = 3600.0

    def __post_init__(self) -> None:
        _require_seconds(self, "worker_timeout_s", "request_timeout_s", "header_timeout_s", "body_timeout_s")
        _require(
            0 <= self.drain_timeout_s <= _DAY_S,
            f"drain_timeout_s={self.drain_timeout_s} must be from 0 to {_DAY_S:.0f} seconds",
        )
        for name in ("max_pins", "max_pins_per_tenant"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative; 0 refuses all pins")
        _require(0 < self.pin_tenant_share <= 1, f"pin_tenant_share={self.pin_tenant_share} must be above 0, at most 1")
        _require(
            self.max_queued_prompt_tokens >= 1,
            f"max_queued_prompt_tokens={self.max_queued_prompt_tokens} must be at least 1",
        )
        _require(
            self.max_worker_queue_s >= 0,
            f"max_worker_queue_s={self.max_worker_queue_s} must not be negative; 0 goes by the worker's steps",
        )
        _require(self.max_pin_ttl_s > 0, f"max_pin_ttl_s={self.max_pin_ttl_s} must be positive")
        _require_at_most(_MAX_TTL_S, self, "max_pin_ttl_s")
        _require(
            1 <= self.tokenizer_threads <= 256, f"tokenizer_threads={self.tokenizer_threads} must be from 1 to 256"
        )
        _require(1 <= self.router_processes <= 64, f"router_processes={self.router_processes} must be from 1 to 64")
        _require(0 <= self.port <= 65535, f"port={self.port} is not a TCP port (0 to 65535)")
        for name in ("max_body_bytes", "max_connections"):
            _require(getattr(self, name) > 0, f"{name}={getattr(self, name)} must be positive")
        _require_at_most(_MAX_COUNT, self, "max_connections", "max_pins", "max_pins_per_tenant", "max_header_bytes")
        _require_at_most(2**40, self, "max_body_bytes")
        for host in self.allowed_hosts:
            _require(
                host == "*" or _HOST.fullmatch(host) is not None,
                f"allowed_hosts: {host!r} is no host name; give one such as api.example.com, once for each; * is any",
            )
        for origin in self.cors_allow_origins:
            _require(
                origin in ("*", "null") or _ORIGIN.fullmatch(origin) is not None,
                f"cors_allow_origins: {origin!r} is no web origin; give one such as http://localhost:3000 "
                "(nothing behind the port), once for each; * is any",
            )
        _require(
            self.max_header_bytes >= 4096,
            f"max_header_bytes={self.max_header_bytes} must be at least 4096; clients need that for keys and cookies",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What `tandem serve` starts."""

    engine: EngineConfig
    transfer: TransferConfig = field(default_factory=TransferConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    num_prefill: int = 1
    num_decode: int = 1
    colocated: bool = False  # one worker playing both roles
    autoscale: bool = True  # flip roles by load; needs three workers or more
    autoscale_interval_s: float = 2.0
    num_gpus_per_worker: float = 0.0
    num_cpus_per_worker: float = 0.0  # 0 = share the machine's cores evenly
    ray_address: str = ""  # "" = a private local Ray; "auto" or an address joins a running cluster
    max_restarts: int = 3  # of one worker within 300 s of service; beyond them it is restarted only beside others

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode"):
            _require(
                self.colocated or getattr(self, name) >= 1,
                f"{name}={getattr(self, name)} must be at least 1; use colocated for one worker that does both",
            )
        _require_at_most(_MAX_WORKERS, self, "num_prefill", "num_decode")
        _require(
            not self.ray_address or _RAY_ADDRESS.fullmatch(self.ray_address) is not None,
            f"ray_address={self.ray_address!r} must be host:port, ray://host:port or auto; empty starts a private Ray",
        )
        _require_seconds(self, "autoscale_interval_s")
        for name in ("num_gpus_per_worker", "num_cpus_per_worker"):
            value = getattr(self, name)
            _require(
                0 <= value <= _MAX_UNITS and (value < 1 or value == int(value)),
                f"{name}={value} must be a whole number or a share of one, from 0 (derived) to {_MAX_UNITS}",
            )
        _require(0 <= self.max_restarts <= 1000, f"max_restarts={self.max_restarts} must be from 0 to 1000")


def cache_folder() -> Path:
    """Folder of everything Tandem fetches: TANDEM_CACHE, else ~/.cache/tandem."""
    return Path(os.environ.get("TANDEM_CACHE") or "~/.cache/tandem").expanduser()

"""Configuration of every component: one frozen dataclass each, each default written once, here.

Flags, keys of a `--config` file, fields and helm values share a name. Values are checked when a configuration is made:
a bad one raises `ConfigError` with the name, the value and the remedy. `protocol/settings.py` explains the annotations.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role
from tandem.protocol.settings import Setting, check_settings

__all__ = [
    "DEFAULT_MODEL",
    "PANELS",
    "ClusterConfig",
    "EngineConfig",
    "ExternalEnginesConfig",
    "RouterConfig",
    "RouterFiles",
    "TierConfig",
    "TransferConfig",
    "WorkerConfig",
    "cache_folder",
]

DEFAULT_MODEL = "smollm2-135m"

# Headings of `--help` and of docs/configuration.md, in their order.
MODEL = "Model"
WORKERS = "Workers"
ENGINES = "Engines"
HTTP = "HTTP"
ENGINE = "Engine (of each worker)"
TRANSFER = "KV transfer"
TIERS = "KV tiers below the pool"
PINS = "Pinned prefixes"
QUEUES = "Queues"
LIMITS = "Limits and timeouts"
PANELS = (MODEL, WORKERS, ENGINES, HTTP, ENGINE, TRANSFER, TIERS, PINS, QUEUES, LIMITS)

DType = Literal["auto", "float32", "bfloat16"]
Codec = Literal["raw", "fp8", "int8", "int4"]
EvictionPolicyName = Literal["hit-density", "lru", "s3-fifo"]

# Upper bounds only catch typing mistakes, which would otherwise fail much later.
_DAY_S = 86_400
_MAX_COUNT = 2**24
_HOST = re.compile(r"\[[0-9a-fA-F:.]+\](:\d+)?|[^\s/:@*,\[\]]+(:\d+)?|[0-9a-fA-F:.]+")
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://([^\s/@*,\[\]]+|\[[0-9a-fA-F:.]+\](:\d+)?)")
_RAY_ADDRESS = re.compile(r"(ray://)?[^\s/:@]+:\d{1,5}|(ray://)?\[[0-9a-fA-F:.]+\]:\d{1,5}|auto")

Seconds = Annotated[float, Meta(gt=0, le=_DAY_S)]
Gigabytes = Annotated[float, Meta(ge=0, le=1_000_000)]  # 10^9 bytes
Count = Annotated[int, Meta(ge=1, le=_MAX_COUNT)]
CountOrZero = Annotated[int, Meta(ge=0, le=_MAX_COUNT)]
NumWorkers = Annotated[int, Meta(ge=0, le=1024)]
UnitsPerWorker = Annotated[float, Meta(ge=0, le=4096)]


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def _is_whole_or_share(value: float) -> bool:
    return value < 1 or value == int(value)


def _is_host(name: str) -> bool:
    return name == "*" or _HOST.fullmatch(name) is not None


def _is_origin(origin: str) -> bool:
    return origin in ("*", "null") or _ORIGIN.fullmatch(origin) is not None


def _is_ray_address(address: str) -> bool:
    return not address or _RAY_ADDRESS.fullmatch(address) is not None


def _is_store_url(url: str) -> bool:
    return not url or "://" in url


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One paged engine."""

    # A worker's is always a local folder: `tandem serve` fetches the model and puts its folder here.
    model: Annotated[
        str,
        Meta(min_length=1),
        Setting(
            f"A local transformers folder, a hub id (org/name), or the built-in {DEFAULT_MODEL}, which is fetched and "
            "converted at the first start.",
            MODEL,
            rule="a folder, a hub id or a built-in name",
        ),
    ] = DEFAULT_MODEL
    served_model_name: Annotated[str, Setting("Name that clients use; empty = the model's own.", MODEL)] = ""
    dtype: Annotated[DType, Setting("Type of weights and KV; auto = the model's own.", MODEL)] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Setting("auto = a GPU where there is one.", MODEL)] = "auto"
    block_size: Annotated[
        int,
        Meta(ge=1, le=256),
        Setting(
            "Tokens of one KV block: a power of two.",
            ENGINE,
            is_valid=_is_power_of_two,
            rule="a power of two from 1 to 256",
        ),
    ] = 16
    pool_bytes: Annotated[
        int,
        Meta(ge=0, le=10**15),
        Setting("Size of the KV pool in bytes; 0 = by the memory of the machine or GPU.", ENGINE),
    ] = 0
    max_model_len: Annotated[
        CountOrZero, Setting("Longest prompt plus answer, in tokens; 0 = the model's own limit.", ENGINE)
    ] = 0
    max_num_seqs: Annotated[Count, Setting("Most sequences in one step.", ENGINE)] = 128
    max_num_batched_tokens: Annotated[
        CountOrZero,
        Setting("Most tokens in one step, which is the chunk size of prefill; 0 = by role and device.", ENGINE),
    ] = 0
    num_threads: Annotated[
        int, Meta(ge=0, le=4096), Setting("CPU threads of a step; 0 = as many as torch chooses.", ENGINE)
    ] = 0

    def __post_init__(self) -> None:
        check_settings(self)
        _require(
            self.max_num_batched_tokens == 0 or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than max_num_seqs={self.max_num_seqs}; "
            "raise it or lower max_num_seqs, so that every running sequence gets its token in each step",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Handoff of KV between two workers."""

    transport: Annotated[
        Literal["nixl", "nccl", "in_process"],
        Setting(
            "Library that moves KV; nccl is gloo on CPUs.",
            TRANSFER,
            flag_type=Literal["nixl", "nccl"],  # in_process does not reach the worker processes that `serve` starts
        ),
    ] = "nixl"
    checksums: Annotated[
        Literal["off", "sample", "all"],
        Setting("Verify KV blocks that arrive from another worker: none, one in 16, or all.", TRANSFER),
    ] = "all"
    lease_ttl_s: Annotated[
        Seconds, Setting("Seconds that lent blocks stay lent after the sender's last heartbeat.", TRANSFER)
    ] = 10.0
    heartbeat_interval_s: Annotated[
        Seconds, Setting("Seconds between two heartbeats; at most a third of the lease.", TRANSFER)
    ] = 1.0
    handoff_timeout_s: Annotated[Seconds, Setting("Seconds to wait for another worker's answer.", TRANSFER)] = 30.0

    def __post_init__(self) -> None:
        check_settings(self)
        _require(
            self.heartbeat_interval_s * 3 <= self.lease_ttl_s,
            f"lease_ttl_s={self.lease_ttl_s} must be at least three heartbeats "
            f"(heartbeat_interval_s={self.heartbeat_interval_s})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """KV beyond the pool: host memory (L2), local disk (L3), object store (L4). A size of 0 or no path: not used."""

    host_cache_gb: Annotated[
        Gigabytes, Setting("GB of host memory, in each worker, for KV that its pool evicts; 0 = none.", TIERS)
    ] = 0.0
    host_cache_codec: Annotated[
        Codec, Setting("Encoding of KV in host memory; all but raw lose a little precision.", TIERS)
    ] = "raw"
    disk_cache_path: Annotated[
        str,
        Setting(
            "Folder for KV on a local disk. The workers of a host share it, and read it again after a restart. "
            "Empty = none.",
            TIERS,
            metavar="FOLDER",
        ),
    ] = ""
    disk_cache_gb: Annotated[Gigabytes, Setting("GB that the folder may hold.", TIERS)] = 20.0
    disk_cache_codec: Annotated[Codec, Setting("Encoding of KV on disk.", TIERS)] = "raw"
    object_cache_url: Annotated[
        str,
        Setting(
            "Object store for KV, such as s3://bucket/prefix, gs://, az:// or file:///folder; empty = none.",
            TIERS,
            metavar="URL",
            is_valid=_is_store_url,
            rule="a URL such as s3://bucket/prefix or file:///folder",
        ),
    ] = ""
    object_cache_gb: Annotated[Gigabytes, Setting("GB that the object store may hold.", TIERS)] = 1000.0
    object_cache_codec: Annotated[Codec, Setting("Encoding of KV in the object store.", TIERS)] = "raw"
    kv_key_file: Annotated[
        str,
        Setting(
            "File with the secret that proves who wrote a block to disk or object store; all hosts that share a store "
            "need the same. Empty = kv-key in the model cache, made at the first start.",
            TIERS,
            metavar="FILE",
        ),
    ] = ""
    eviction_policy: Annotated[EvictionPolicyName, Setting("Policy that chooses what a full tier evicts.", TIERS)] = (
        "hit-density"
    )
    pin_share: Annotated[
        float,
        Meta(ge=0, le=0.9),
        Setting("Share of the pool and of each tier that pinned prefixes may occupy; 0 = no pins.", PINS),
    ] = 0.25

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def is_used(self) -> bool:
        """Whether there is any tier below the pool."""
        return bool(self.host_cache_gb or self.disk_cache_path or self.object_cache_url)

    @property
    def codec_identity(self) -> str:
        """Lossy codecs that KV of this worker may have passed through, which is part of its identity; "raw" if none."""
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
    socket_folder: str = ""  # private folder for its sockets; empty = TCP ports of `host`
    router_key: str = ""  # public key of the router that may connect; empty = no router may
    cpu_cores: tuple[int, ...] = ()  # cores to pin to; empty = no pinning


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The HTTP frontend and placement."""

    host: Annotated[str, Setting("Address to listen on; 0.0.0.0 = reachable from outside.", HTTP)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), Setting("TCP port; 0 = any free one.", HTTP)] = 8000
    cors_allow_origins: Annotated[
        tuple[str, ...],
        Setting(
            "Web origin whose pages may call, such as http://localhost:3000; repeat the flag for several; * = all.",
            HTTP,
            metavar="ORIGIN",
            is_valid=_is_origin,
            rule="a web origin such as http://localhost:3000, with nothing behind the port, or * for any",
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "Host name that requests may be sent to; repeat the flag for several; * = all. A server on loopback "
            "allows localhost and the machine's own addresses without it; other servers check nothing by default.",
            HTTP,
            metavar="HOST",
            is_valid=_is_host,
            rule="one host name such as api.example.com, or * for any",
        ),
    ] = ()
    router_processes: Annotated[
        int,
        Meta(ge=1, le=64),
        Setting("Processes that share the HTTP port; more than one is needed beyond about 100 streams.", HTTP),
    ] = 1
    local_prefill: Annotated[
        bool, Setting("Let a decode worker compute a prompt itself where that is cheaper than a handoff.", WORKERS)
    ] = True
    max_queued_prompt_tokens: Annotated[
        int,
        Meta(ge=1, le=2**62),  # a simulation sets no limit
        Setting("Most prompt tokens that may wait for one model; requests beyond it get 429.", QUEUES),
    ] = 2_000_000
    max_worker_queue_s: Annotated[
        float,
        Meta(ge=0, le=1e12),  # a very large value lets every request through to the workers' own queues
        Setting(
            "A worker with more predicted seconds of queued prompts gets no more of them; they wait in the router, "
            "where their order can change. 0 = two full steps, or half of one while a tenant sends several "
            "priorities.",
            QUEUES,
        ),
    ] = 0.0
    pin_tenant_share: Annotated[
        float,
        Meta(gt=0, le=1),
        Setting("Share of --pin-share that the pins of one tenant may occupy.", PINS, own_workers_only=True),
    ] = 0.5
    max_pins: Annotated[CountOrZero, Setting("Most pins at one time; 0 = no pins.", PINS, own_workers_only=True)] = 1024
    max_pins_per_tenant: Annotated[
        CountOrZero, Setting("Most pins of one tenant at one time; 0 = no pins.", PINS, own_workers_only=True)
    ] = 128
    max_pin_ttl_s: Annotated[
        float,
        Meta(gt=0, le=366 * _DAY_S),
        Setting("Longest time that a pin may last, in seconds.", PINS, own_workers_only=True),
    ] = 3600.0
    max_body_bytes: Annotated[int, Meta(ge=1, le=2**40), Setting("Largest request body, in bytes.", LIMITS)] = 8 << 20
    max_header_bytes: Annotated[
        int,
        Meta(ge=4096, le=_MAX_COUNT),  # clients need 4 KB for keys and cookies
        Setting("Largest URL and header lines of a request together, in bytes.", LIMITS),
    ] = 32 << 10
    max_connections: Annotated[Count, Setting("Most open connections of each router process.", LIMITS)] = 2048
    header_timeout_s: Annotated[Seconds, Setting("Seconds a client has to send a header.", LIMITS)] = 10.0
    body_timeout_s: Annotated[
        Seconds, Setting("Seconds a client has to send a body, plus 1 s for each 16 KB that has arrived.", LIMITS)
    ] = 30.0
    tokenizer_threads: Annotated[
        int, Meta(ge=1, le=256), Setting("Threads of each router process that tokenize long prompts.", LIMITS)
    ] = 2
    worker_timeout_s: Annotated[
        Seconds, Setting("Seconds of silence after which a worker or an engine counts as dead.", LIMITS)
    ] = 8.0
    request_timeout_s: Annotated[
        Seconds, Setting("Longest time between two tokens of an answer, in seconds.", LIMITS)
    ] = 600.0
    drain_timeout_s: Annotated[
        float, Meta(ge=0, le=_DAY_S), Setting("Seconds that running answers get to finish at Ctrl-C.", LIMITS)
    ] = 5.0

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFiles:
    """Files that the command reads once, before anything starts. The router gets their content."""

    api_key_file: Annotated[
        str,
        Setting(
            "File of API keys: one key per line, optionally followed by its tenant, or by * for an operator; "
            "empty = no authentication.",
            HTTP,
            metavar="FILE",
        ),
    ] = ""
    tenants: Annotated[
        str,
        Setting(
            "TOML file with the weight, ttft_slo_ms and max_queue_share of each tenant (docs/admission.md); "
            "empty = all tenants are alike.",
            QUEUES,
            metavar="FILE",
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEnginesConfig:
    """How `tandem route` treats its engines."""

    allow_local_engines: Annotated[
        bool,
        Setting("Let engines added over /v1/engines be on this machine, or at link-local addresses.", ENGINES),
    ] = False
    max_attempts: Annotated[
        int, Meta(gt=0, le=_DAY_S), Setting("Most engines that one request is tried on, before its first byte.", LIMITS)
    ] = 3
    connect_timeout_s: Annotated[Seconds, Setting("Seconds to connect to an engine.", LIMITS)] = 2.0
    probe_interval_s: Annotated[Seconds, Setting("Seconds between two health checks of an engine.", LIMITS)] = 1.0
    probe_timeout_s: Annotated[Seconds, Setting("Seconds an engine has to answer a health check.", LIMITS)] = 2.0
    max_failed_probes: Annotated[
        int,
        Meta(gt=0, le=_DAY_S),
        Setting(
            "Failed health checks in a row after which an engine counts as gone. Requests that wait there for their "
            "first byte then go elsewhere.",
            LIMITS,
        ),
    ] = 2
    breaker_failures: Annotated[
        int, Meta(gt=0, le=_DAY_S), Setting("Failed requests in a row that open an engine's circuit breaker.", LIMITS)
    ] = 3
    breaker_open_s: Annotated[
        Seconds,
        Setting("Seconds for which the breaker opens at first; they double with each failed trial.", LIMITS),
    ] = 1.0
    # Clients give up after 30 s or more: a healthy engine is tried again well before that.
    breaker_max_open_s: Annotated[Seconds, Setting("Seconds for which it opens at most.", LIMITS)] = 8.0

    def __post_init__(self) -> None:
        check_settings(self)
        _require(
            self.breaker_max_open_s >= self.breaker_open_s,
            f"breaker_max_open_s={self.breaker_max_open_s} is less than breaker_open_s={self.breaker_open_s}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Everything that `tandem serve` starts."""

    engine: EngineConfig
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
        bool,
        Setting(
            "One worker that does both, for small machines and for comparison.",
            WORKERS,
            flag="--colocated/--disaggregated",
        ),
    ] = False
    autoscale: Annotated[
        bool, Setting("Move workers between prefill and decode by load; needs three or more.", WORKERS)
    ] = True
    autoscale_interval_s: Annotated[Seconds, Setting("Seconds between two decisions of the autoscaler.", WORKERS)] = 2.0
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

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("num_prefill", "num_decode"):
            _require(
                self.colocated or getattr(self, name) >= 1,
                f"{name}={getattr(self, name)} must be at least 1; use colocated for one worker that does both",
            )


def cache_folder() -> Path:
    """Folder of everything Tandem fetches: TANDEM_CACHE, else ~/.cache/tandem."""
    return Path(os.environ.get("TANDEM_CACHE") or "~/.cache/tandem").expanduser()

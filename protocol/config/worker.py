"""Configuration of a worker: its engine, the transfer of KV to other workers, and the tiers below its pool."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from msgspec import Meta

from tandem.protocol.config.panels import (
    ENGINE,
    MODEL,
    PINS,
    TIERS,
    TRANSFER,
    Count,
    CountOrZero,
    Gigabytes,
    Seconds,
)
from tandem.protocol.config.tiers import OBJECT_TIER, TierSpec, check_names, parse_tier
from tandem.protocol.faults import parse_faults
from tandem.protocol.messages import DISK_TIER, HOST_TIER, Role
from tandem.protocol.settings import Setting, check_settings, require

DEFAULT_MODEL = "smollm2-135m"
_HEARTBEATS_PER_LEASE = 10
MAX_DRAFT = 64  # tokens
MAX_TIER_CHARS = 512  # routers know a store by its name
GPU_MEMORY_SHARE = 0.9  # what workers take; the rest is for temporaries of steps, CUDA itself and fragmentation

DType = Literal["auto", "float32", "bfloat16"]
AttentionBackendName = Literal["auto", "cpu", "fa3", "triton"]
Codec = Literal["raw", "exact", "fp8", "int8", "int4"]


def _is_power_of_two(value: int) -> bool:
    return value & (value - 1) == 0


def _is_speculation(text: str) -> bool:
    is_number = text.isascii() and text.isdigit() and len(text) < 3
    return text in ("auto", "off") or (is_number and 1 <= int(text) <= MAX_DRAFT)


def _has_room_for_an_answer(max_model_len: int) -> bool:
    return max_model_len != 1


def _is_served_name(name: str) -> bool:
    return name.isprintable() and name == name.strip()


def _are_faults(text: str) -> bool:
    try:
        parse_faults(text)
    except ValueError:
        return False
    return True


def _is_store_url(url: str) -> bool:
    return not url or "://" in url


def _is_tier(text: str) -> bool:
    return text.isprintable() and ":" in text and len(text) <= MAX_TIER_CHARS


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One paged engine."""

    # For a worker it is always a local folder: `tandem serve` fetches the model and puts its folder here.
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
    served_model_name: Annotated[
        str,
        Setting(
            "Name that clients use; empty = the model's own.",
            MODEL,
            is_valid=_is_served_name,
            rule="printable characters, without a space at either end",
        ),
    ] = ""
    dtype: Annotated[DType, Setting("Type of weights and KV; auto = the model's own.", MODEL)] = "auto"
    weights: Annotated[
        Literal["as-loaded", "int8", "fp8"],
        Setting(
            "How linear layers keep their weights. int8, and fp8 on GPUs, take half the memory and change answers.",
            MODEL,
        ),
    ] = "as-loaded"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Setting(
            "Type of KV in the pool; auto = the model's, fp8 (e4m3, without scales) on GPUs takes half the memory of "
            "bfloat16 and changes answers.",
            MODEL,
        ),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu", "cuda"], Setting("auto = a GPU where there is one.", MODEL)] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Meta(ge=1, le=64),
        Setting(
            "Ranks of a worker, which compute every layer together: with a GPU each, or a part of the worker's cores.",
            ENGINE,
        ),
    ] = 1
    decode_parallel_size: Annotated[
        int, Meta(ge=0, le=64), Setting("Ranks of workers that start as decode; 0 = tensor_parallel_size.", ENGINE)
    ] = 0
    attention_backend: Annotated[
        AttentionBackendName,
        Setting(
            "Kernel of paged attention; auto = cpu on CPUs, fa3 on Hopper GPUs where FlashAttention 3 is installed and "
            "can serve the model, else triton.",
            ENGINE,
        ),
    ] = "auto"
    exact: Annotated[
        Literal["off", "on"],
        Setting(
            "on = a token's bits depend neither on what else is computed nor on which worker does it, or the model is "
            "refused. CPUs compute so anyway, GPUs then take longer.",
            ENGINE,
        ),
    ] = "off"
    cuda_graphs: Annotated[
        Literal["auto", "off"],
        Setting(
            "auto = record steps as CUDA graphs at start, so that launching them costs little: those that only decode "
            "as a whole, others of up to 512 tokens between attentions; a model that cannot be recorded is served "
            "without.",
            ENGINE,
        ),
    ] = "auto"
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
    gpu_memory_share: Annotated[
        float,
        Meta(ge=0, le=1),
        Setting("Share of its GPU's memory that a worker may take; 0 = 0.9 of its share of the GPU.", ENGINE),
    ] = 0.0
    max_model_len: Annotated[
        CountOrZero,
        Setting(
            "Longest prompt plus answer, in tokens; 0 = the model's own limit.",
            ENGINE,
            is_valid=_has_room_for_an_answer,
            rule="0, or from 2 to 16777216",
        ),
    ] = 0
    max_num_seqs: Annotated[Count, Setting("Most sequences in one step.", ENGINE)] = 128
    max_num_batched_tokens: Annotated[
        CountOrZero,
        Setting("Most tokens in one step, which is the chunk size of prefill; 0 = by role and device.", ENGINE),
    ] = 0
    speculate: Annotated[
        str,
        Setting(
            "Draft next tokens from existing text, and check many in one step, on CPUs and where exact=on; answers "
            "stay the same. auto = where measurements show that it pays; off = none; a number = always up to this many "
            "tokens.",
            ENGINE,
            is_valid=_is_speculation,
            rule="auto, off, or a number of tokens from 1 to 64",
        ),
    ] = "auto"
    num_threads: int = 0  # CPU threads of a step; no flag. 0 = as many as torch chooses

    def __post_init__(self) -> None:
        check_settings(self)
        require(
            self.max_num_batched_tokens == 0 or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is smaller than max_num_seqs={self.max_num_seqs}; "
            "raise it or lower max_num_seqs, so that every running sequence gets its token in each step",
        )
        require(
            self.exact == "off" or self.attention_backend != "fa3",
            "exact='on' cannot be kept by attention_backend='fa3', whose sums depend on the batch; leave one out",
        )
        require(
            self.kv_cache_dtype == "auto" or self.attention_backend in ("auto", "triton"),
            f"kv_cache_dtype='fp8' is not read by attention_backend={self.attention_backend!r}; leave one out",
        )
        require(
            self.kv_cache_dtype == "auto" or self.device != "cpu" or self.attention_backend == "triton",
            "kv_cache_dtype='fp8' has kernels for GPUs only; leave it out on a CPU",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Handoff of KV between two workers."""

    transport: Annotated[
        str,
        Setting(
            "Library that moves KV; nccl uses gloo on CPUs.",
            TRANSFER,
            rule="nixl, nccl, or a name that an installed package adds (entry points tandem.kv_transports)",
        ),
    ] = "nixl"
    checksums: Annotated[
        Literal["off", "all"], Setting("Verify all KV blocks that arrive from another worker, or none.", TRANSFER)
    ] = "all"
    wire_codec: Annotated[
        Literal["raw", "auto", "exact"],
        Setting(
            "Pack KV in bfloat16 for its way to another worker, without loss: raw = never, exact = always, auto = "
            "where the measured speeds of link and packing say that it pays.",
            TRANSFER,
        ),
    ] = "auto"
    lease_ttl_s: Annotated[
        Seconds, Setting("Seconds that lent blocks stay lent after the sender's last heartbeat.", TRANSFER)
    ] = 10.0
    handoff_timeout_s: Annotated[Seconds, Setting("Seconds to wait for another worker's answer.", TRANSFER)] = 30.0
    inject_faults: Annotated[
        str,
        Setting(
            "For trials only: faults in writes of KV and their rates, such as flip=0.01,delay=0.05,seed=1 "
            "(docs/chaos.md). Empty = none.",
            TRANSFER,
            metavar="RATES",
            is_valid=_are_faults,
            rule="faults and rates such as flip=0.01,delay=0.05; docs/chaos.md lists them",
        ),
    ] = ""

    max_heartbeat_interval_s: float = 1.0  # no flag

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats: several of them may be lost before a lease ends."""
        return min(self.max_heartbeat_interval_s, self.lease_ttl_s / _HEARTBEATS_PER_LEASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """KV beyond the pool: a list of tiers. The settings of host, disk and object are short forms of such a tier."""

    tier: Annotated[
        tuple[str, ...],
        Setting(
            "A place for KV beyond the pool: host:64GB, numa:2?gb=256, dax:/dev/dax0.0?gb=512, disk:/ssd/kv?gb=2000, "
            "s3://bucket/prefix?gb=9, or what an installed package adds. More options: codec=, eviction=, name=. "
            "Repeat it, from fast to slow.",
            TIERS,
            metavar="SPEC",
            is_valid=_is_tier,
            rule="a kind of store, its place and options (docs/tiers.md)",
        ),
    ] = ()
    host_cache_gb: Annotated[
        Gigabytes, Setting("GB of host memory, in each worker, for KV that its pool evicts; 0 = none.", TIERS)
    ] = 0.0
    host_cache_codec: Annotated[
        Codec, Setting("Encoding of KV in host memory; all but raw and exact lose a little precision.", TIERS)
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
            "File with the secret that proves who wrote a block to a store outside memory; all hosts that share one "
            "need the same. Empty = kv-key in the model cache, created at the first start.",
            TIERS,
            metavar="FILE",
        ),
    ] = ""
    kv_encryption: Annotated[
        Literal["off", "on"],
        Setting(
            "Encrypt KV on disk and in the object store, with keys made from the secret of kv_key_file. Blocks that "
            "were stored without it are not found, and vice versa.",
            TIERS,
        ),
    ] = "off"
    pin_share: Annotated[
        float,
        Meta(ge=0, le=0.9),
        Setting("Share of the pool and of each tier that pinned prefixes may occupy; 0 = no pins.", PINS),
    ] = 0.25
    # The rest have no flags.
    eviction_policy: str = "hit-density"  # chooses what a full tier evicts that names none
    load_window_mb: float = 256.0  # of KV that a worker loads at one time, for all its prompts, from tiers and peers
    load_step_mb: float = 32.0  # of loaded KV copied into the pool between two steps; more delays running answers

    def __post_init__(self) -> None:
        check_settings(self)
        for size, place in (("disk_cache_gb", "disk_cache_path"), ("object_cache_gb", "object_cache_url")):
            require(
                getattr(self, size) > 0 or not getattr(self, place),
                f"{size}=0 would keep nothing in {place}={getattr(self, place)!r}; raise it, or leave {place} out",
            )
        check_names(self.specs)
        for spec in self.specs:
            codecs = get_args(Codec)
            require(spec.codec in codecs, f"{spec.setting}: codec={spec.codec!r} must be one of {', '.join(codecs)}")
        require(
            self.kv_encryption == "off" or self.is_sealed,
            "kv_encryption='on' would encrypt nothing: it is for KV that leaves a worker's memory; give "
            "disk_cache_path, object_cache_url or another tier too, or leave it out",
        )

    @property
    def specs(self) -> tuple[TierSpec, ...]:
        """All tiers, from fast to slow."""
        tiers = [parse_tier(text, eviction=self.eviction_policy) for text in self.tier]
        if self.host_cache_gb:
            tiers.insert(0, self._short_form(f"host_cache_gb={self.host_cache_gb:g}", "host:", HOST_TIER))
        if self.disk_cache_path:
            tiers.append(self._short_form("disk_cache_path", f"disk:{self.disk_cache_path}", DISK_TIER))
        if self.object_cache_url:
            tiers.append(self._short_form("object_cache_url", self.object_cache_url, OBJECT_TIER))
        return tuple(tiers)

    def _short_form(self, setting: str, url: str, name: str) -> TierSpec:
        scheme, _, place = url.partition(":")
        return TierSpec(
            scheme=scheme,
            place=place,
            gb=getattr(self, f"{name}_cache_gb"),
            name=name,
            codec=getattr(self, f"{name}_cache_codec"),
            eviction=self.eviction_policy,
            setting=setting,
        )

    @property
    def is_sealed(self) -> bool:
        """Whether there is a tier whose blocks are sealed, because they outlive the worker or others read them."""
        return not all(spec.is_memory for spec in self.specs)

    @property
    def codec_identity(self) -> str:
        """Lossy codecs that KV of this worker may have passed through, which is part of its identity; "raw" if none."""
        return "+".join(sorted({spec.codec for spec in self.specs} - {"raw", "exact"})) or "raw"


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

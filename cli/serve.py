"""`tandem serve`: flags to a `ClusterConfig`, the checks that need no worker, then over to the launcher."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from tandem.cli.config_flags import (
    HTTP,
    LIMITS,
    AllowedHosts,
    ApiKeyFile,
    BodyTimeout,
    CorsOrigins,
    HeaderTimeout,
    Host,
    MaxBodyBytes,
    MaxConnections,
    MaxHeaderBytes,
    Port,
    TenantsFile,
    default_of,
    from_flags,
)
from tandem.cluster.model_store import DEFAULT_MODEL, resolve_model, served_name
from tandem.protocol.config import ClusterConfig, Codec, DType, EngineConfig, RouterConfig, TierConfig, TransferConfig
from tandem.protocol.errors import ConfigError
from tandem.router.http.api_keys import load_api_keys
from tandem.router.http.listening import listening
from tandem.scheduling.tenants import load_tenants
from tandem.worker.kv.tier_check import check_tiers

__all__ = ["build_config", "serve"]

_MODEL = "Model"
_POOLS = "Workers"
_ENGINE = "Engine (of each worker)"
_TRANSFER = "KV transfer"
_TIERS = "KV tiers below the pool"
_MAX_POOL_GB = 1_000_000


def serve(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="A local transformers folder, a hub id (org/name), or the built-in smollm2-135m, "
            "which is fetched and converted at the first start.",
            rich_help_panel=_MODEL,
        ),
    ] = DEFAULT_MODEL,
    served_model_name: Annotated[
        str, typer.Option(help="Name clients use; empty = taken from the model.", rich_help_panel=_MODEL)
    ] = default_of(EngineConfig, "served_model_name"),
    dtype: Annotated[
        DType, typer.Option(help="Type of weights and KV; auto = the model's own.", rich_help_panel=_MODEL)
    ] = default_of(EngineConfig, "dtype"),
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        typer.Option(help="auto = a GPU where there is one.", rich_help_panel=_MODEL),
    ] = default_of(EngineConfig, "device"),
    num_prefill: Annotated[
        int,
        typer.Option(help="Workers that start as prefill; short: --prefill.", rich_help_panel=_POOLS),
    ] = default_of(ClusterConfig, "num_prefill"),
    num_decode: Annotated[
        int, typer.Option(help="Workers that start as decode; short: --decode.", rich_help_panel=_POOLS)
    ] = default_of(ClusterConfig, "num_decode"),
    colocated: Annotated[
        bool,
        typer.Option(
            "--colocated/--disaggregated",
            help="One worker that does both, for small machines and for comparison.",
            rich_help_panel=_POOLS,
        ),
    ] = default_of(ClusterConfig, "colocated"),
    autoscale: Annotated[
        bool,
        typer.Option(help="Flip workers between the pools by load; needs three or more.", rich_help_panel=_POOLS),
    ] = default_of(ClusterConfig, "autoscale"),
    autoscale_interval_s: Annotated[
        float, typer.Option(help="Seconds between two looks at the load.", rich_help_panel=_POOLS)
    ] = default_of(ClusterConfig, "autoscale_interval_s"),
    num_gpus_per_worker: Annotated[
        float,
        typer.Option(help="GPUs Ray sets aside for each; short: --gpus-per-worker.", rich_help_panel=_POOLS),
    ] = default_of(ClusterConfig, "num_gpus_per_worker"),
    num_cpus_per_worker: Annotated[
        float,
        typer.Option(
            help="Cores for each; 0 = share the machine's evenly; short: --cpus-per-worker.", rich_help_panel=_POOLS
        ),
    ] = default_of(ClusterConfig, "num_cpus_per_worker"),
    max_restarts: Annotated[
        int, typer.Option(help="Times one worker is started again after a crash.", rich_help_panel=_POOLS)
    ] = default_of(ClusterConfig, "max_restarts"),
    ray_address: Annotated[
        str,
        typer.Option(
            help="auto or host:port joins a running Ray cluster; empty = a private one on this machine.",
            rich_help_panel=_POOLS,
        ),
    ] = default_of(ClusterConfig, "ray_address"),
    local_prefill: Annotated[
        bool,
        typer.Option(
            help="Let a decode worker compute a prompt itself where that is cheaper than a handoff.",
            rich_help_panel=_POOLS,
        ),
    ] = default_of(RouterConfig, "local_prefill"),
    host: Host = default_of(RouterConfig, "host"),
    port: Port = default_of(RouterConfig, "port"),
    cors_allow_origins: CorsOrigins = list(default_of(RouterConfig, "cors_allow_origins")),  # noqa: B006  # typer copies
    allowed_hosts: AllowedHosts = list(default_of(RouterConfig, "allowed_hosts")),  # noqa: B006
    block_size: Annotated[
        int, typer.Option(help="Tokens of one KV block: a power of two up to 256.", rich_help_panel=_ENGINE)
    ] = default_of(EngineConfig, "block_size"),
    pool_bytes: Annotated[
        int, typer.Option(help="Bytes of KV pool; 0 = derived from free memory.", rich_help_panel=_ENGINE)
    ] = default_of(EngineConfig, "pool_bytes"),
    pool_gb: Annotated[
        float | None, typer.Option(help="The same in GB (10^9 bytes).", rich_help_panel=_ENGINE, show_default=False)
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(help="Longest prompt plus answer, in tokens; 0 = the model's own.", rich_help_panel=_ENGINE)
    ] = default_of(EngineConfig, "max_model_len"),
    max_num_seqs: Annotated[int, typer.Option(help="Sequences in one step.", rich_help_panel=_ENGINE)] = default_of(
        EngineConfig, "max_num_seqs"
    ),
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens in one step: the chunk size of prefill; 0 = by role and device.", rich_help_panel=_ENGINE
        ),
    ] = default_of(EngineConfig, "max_num_batched_tokens"),
    num_threads: Annotated[
        int, typer.Option(help="CPU threads of a step; 0 = left to torch.", rich_help_panel=_ENGINE)
    ] = default_of(EngineConfig, "num_threads"),
    transport: Annotated[
        Literal["nixl", "nccl"],  # in_process cannot reach the worker processes that are started here
        typer.Option(help="How KV travels; nccl is gloo on CPUs.", rich_help_panel=_TRANSFER),
    ] = default_of(TransferConfig, "transport"),
    checksums: Annotated[
        Literal["off", "sample", "all"],
        typer.Option(
            help="Verify KV blocks that arrive from another worker: none, one in 16, or all.", rich_help_panel=_TRANSFER
        ),
    ] = default_of(TransferConfig, "checksums"),
    lease_ttl_s: Annotated[
        float, typer.Option(help="Seconds lent blocks outlive the lender's silence.", rich_help_panel=_TRANSFER)
    ] = default_of(TransferConfig, "lease_ttl_s"),
    heartbeat_interval_s: Annotated[
        float,
        typer.Option(help="Seconds between signs of life; a third of the lease at most.", rich_help_panel=_TRANSFER),
    ] = default_of(TransferConfig, "heartbeat_interval_s"),
    handoff_timeout_s: Annotated[
        float, typer.Option(help="Longest wait for another worker's answer, in seconds.", rich_help_panel=_TRANSFER)
    ] = default_of(TransferConfig, "handoff_timeout_s"),
    host_cache_gb: Annotated[
        float,
        typer.Option(help="GB of host memory of each worker for KV its pool evicts; 0 = none.", rich_help_panel=_TIERS),
    ] = default_of(TierConfig, "host_cache_gb"),
    host_cache_codec: Annotated[
        Codec, typer.Option(help="How KV is kept there; all but raw lose a little.", rich_help_panel=_TIERS)
    ] = default_of(TierConfig, "host_cache_codec"),
    disk_cache_path: Annotated[
        str,
        typer.Option(
            help="Folder for KV on a local disk, shared by the workers of a host and read again after a restart; "
            "empty = none.",
            rich_help_panel=_TIERS,
        ),
    ] = default_of(TierConfig, "disk_cache_path"),
    disk_cache_gb: Annotated[float, typer.Option(help="GB the folder may hold.", rich_help_panel=_TIERS)] = default_of(
        TierConfig, "disk_cache_gb"
    ),
    disk_cache_codec: Annotated[Codec, typer.Option(help="How KV is kept there.", rich_help_panel=_TIERS)] = default_of(
        TierConfig, "disk_cache_codec"
    ),
    object_cache_url: Annotated[
        str,
        typer.Option(
            help="Object store for KV, such as s3://bucket/prefix or file:///folder; empty = none.",
            rich_help_panel=_TIERS,
        ),
    ] = default_of(TierConfig, "object_cache_url"),
    object_cache_gb: Annotated[float, typer.Option(help="GB it may hold.", rich_help_panel=_TIERS)] = default_of(
        TierConfig, "object_cache_gb"
    ),
    object_cache_codec: Annotated[
        Codec, typer.Option(help="How KV is kept there.", rich_help_panel=_TIERS)
    ] = default_of(TierConfig, "object_cache_codec"),
    kv_key_file: Annotated[
        str,
        typer.Option(
            help="File with the secret that proves who wrote a block to disk or object store; the same on all hosts "
            "that share one. Empty = kv-key in the model cache, made at the first start.",
            rich_help_panel=_TIERS,
        ),
    ] = default_of(TierConfig, "kv_key_file"),
    eviction_policy: Annotated[
        str, typer.Option(help="What leaves a full tier first.", rich_help_panel=_TIERS)
    ] = default_of(TierConfig, "eviction_policy"),
    pin_share: Annotated[
        float,
        typer.Option(
            help="Share of the pool and of each tier that pinned prefixes may keep; 0 = no pins.",
            rich_help_panel=_TIERS,
        ),
    ] = default_of(TierConfig, "pin_share"),
    pin_tenant_share: Annotated[
        float,
        typer.Option(help="Share of that for the pins of one tenant.", rich_help_panel=_TIERS),
    ] = default_of(RouterConfig, "pin_tenant_share"),
    max_pins: Annotated[int, typer.Option(help="Pins at one time.", rich_help_panel=_TIERS)] = default_of(
        RouterConfig, "max_pins"
    ),
    max_pins_per_tenant: Annotated[
        int, typer.Option(help="Pins of one tenant at one time.", rich_help_panel=_TIERS)
    ] = default_of(RouterConfig, "max_pins_per_tenant"),
    max_pin_ttl_s: Annotated[
        float, typer.Option(help="Longest time a pin may last, in seconds.", rich_help_panel=_TIERS)
    ] = default_of(RouterConfig, "max_pin_ttl_s"),
    api_key_file: ApiKeyFile = "",
    max_body_bytes: MaxBodyBytes = default_of(RouterConfig, "max_body_bytes"),
    max_header_bytes: MaxHeaderBytes = default_of(RouterConfig, "max_header_bytes"),
    max_connections: MaxConnections = default_of(RouterConfig, "max_connections"),
    header_timeout_s: HeaderTimeout = default_of(RouterConfig, "header_timeout_s"),
    body_timeout_s: BodyTimeout = default_of(RouterConfig, "body_timeout_s"),
    max_queued_prompt_tokens: Annotated[
        int,
        typer.Option(help="Prompt tokens waiting in all; above it requests get 429.", rich_help_panel=LIMITS),
    ] = default_of(RouterConfig, "max_queued_prompt_tokens"),
    max_worker_queue_s: Annotated[
        float,
        typer.Option(
            help="Predicted seconds of prompts at a worker above which others wait in the router, where the order "
            "can change; 0 = two full steps, or half of one while a tenant sends several priorities.",
            rich_help_panel=LIMITS,
        ),
    ] = default_of(RouterConfig, "max_worker_queue_s"),
    tenants: TenantsFile = "",
    router_processes: Annotated[
        int,
        typer.Option(
            help="Processes that answer HTTP on the port; one decides for all. Needed beyond some 100 streams.",
            rich_help_panel=HTTP,
        ),
    ] = default_of(RouterConfig, "router_processes"),
    tokenizer_threads: Annotated[
        int, typer.Option(help="Threads of each router process for long prompts.", rich_help_panel=LIMITS)
    ] = default_of(RouterConfig, "tokenizer_threads"),
    worker_timeout_s: Annotated[
        float, typer.Option(help="Seconds of silence after which a worker counts as dead.", rich_help_panel=LIMITS)
    ] = default_of(RouterConfig, "worker_timeout_s"),
    request_timeout_s: Annotated[
        float,
        typer.Option(help="Longest silence between two tokens of a request, in seconds.", rich_help_panel=LIMITS),
    ] = default_of(RouterConfig, "request_timeout_s"),
    drain_timeout_s: Annotated[
        float, typer.Option(help="Seconds running answers get to finish at Ctrl-C.", rich_help_panel=LIMITS)
    ] = default_of(RouterConfig, "drain_timeout_s"),
) -> int:
    """Serve a model over the OpenAI API until Ctrl-C.

    Starts prefill and decode workers and a router in front of them. Without flags: one of each, with the small
    built-in model, on http://127.0.0.1:8000.

    [bold]Examples[/bold]

    [cyan]tandem serve[/cyan]

    [cyan]tandem serve --model ~/models/qwen3-4b --prefill 1 --decode 3 --gpus-per-worker 1[/cyan]

    [cyan]tandem serve --colocated --pool-gb 2 --port 8001[/cyan]

    [cyan]tandem serve --ray-address auto --host 0.0.0.0[/cyan]
    """
    flags: dict[str, Any] = dict(ctx.params)
    _refuse_sizes_of_pools(ctx)
    early = build_config(flags | {"model": "."})  # a bad value is told before a model is fetched
    check_tiers(early.tiers, is_local=not early.ray_address)
    policies, api_keys = load_tenants(tenants), load_api_keys(api_key_file)
    with listening(host, port):
        pass  # asked before anything is fetched or started
    console = Console(stderr=True, highlight=False)
    with console.status(f"model {model}"):
        folder = resolve_model(model, report=lambda line: console.print(f"  {line}"))
    name = served_model_name or served_name(model)
    config = build_config(flags | {"model": str(folder), "served_model_name": name})

    from tandem.cluster.serve import serve as launch  # here: it brings Ray, which `tandem --help` need not wait for

    return launch(config, policies, api_keys)


def _refuse_sizes_of_pools(ctx: typer.Context) -> None:
    """Raise ConfigError where --colocated would leave the number of workers of a pool unused."""
    for name in ("num_prefill", "num_decode"):
        source = ctx.get_parameter_source(name)
        if ctx.params["colocated"] and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"colocated is one worker for both roles; {name}={ctx.params[name]} has no use with it")


def build_config(flags: dict[str, Any]) -> ClusterConfig:
    """The whole configuration out of flags named as its fields. Raises `ConfigError`."""
    if flags.get("pool_gb") is not None:
        if flags["pool_bytes"]:
            raise ConfigError("pool_gb and pool_bytes say the same thing; give one of them")
        if not 0 <= flags["pool_gb"] <= _MAX_POOL_GB:
            raise ConfigError(f"pool_gb={flags['pool_gb']} must be from 0 (derived from free memory) to {_MAX_POOL_GB}")
        flags = flags | {"pool_bytes": round(flags["pool_gb"] * 1e9)}
    return from_flags(
        ClusterConfig,
        flags,
        engine=from_flags(EngineConfig, flags),
        transfer=from_flags(TransferConfig, flags),
        tiers=from_flags(TierConfig, flags),
        router=from_flags(RouterConfig, flags),
    )

"""`tandem serve`: turns settings into a `ClusterConfig`, checks what needs no worker, and calls the launcher."""

from __future__ import annotations

from rich.markup import escape

from tandem.cli.config_flags import Values, fields_by_panel, with_settings
from tandem.cluster.machine_check import check_machine, check_model_fits
from tandem.cluster.model_store import check_model, resolve_model, served_name
from tandem.cluster.node_config import name_for_nodes
from tandem.frontend.http.listening import listening
from tandem.frontend.http.tls import check_server_tls
from tandem.frontend.keys.audit_log import check_audit_log
from tandem.frontend.keys.key_file import KeyFile
from tandem.protocol.config import (
    ClusterConfig,
    EngineConfig,
    ManagedEngineConfig,
    RouterConfig,
    RouterFiles,
    TierConfig,
    TransferConfig,
)
from tandem.protocol.errors import ConfigError
from tandem.protocol.plugins import KV_TRANSPORTS
from tandem.protocol.settings import changed_settings, from_values, settings_of
from tandem.runtime.status_console import StatusConsole
from tandem.runtime.tracing.setup import check_tracing
from tandem.scheduling.admission.tenants import load_tenants
from tandem.worker.kv.tier_check import check_tiers

SERVE_FIELDS = fields_by_panel(
    "serve", EngineConfig, ManagedEngineConfig, ClusterConfig, TransferConfig, TierConfig, RouterConfig, RouterFiles
)
# Settings that servers of another engine do not read.
_OWN_ENGINE_ONLY = {
    field.name
    for config in (EngineConfig, TransferConfig, TierConfig, RouterConfig)
    for field in settings_of(config)
    if config is not RouterConfig or field.setting.command == "serve"
} - {"model", "served_model_name", "worker_stall_timeout_s", "host_cache_gb", "disk_cache_path"}
_OF_TWO_ROLES = ("num_prefill", "num_decode", "decode_parallel_size")


@with_settings(SERVE_FIELDS, overrides={"colocated": _OF_TWO_ROLES})
def serve(values: Values) -> int:
    """Serve a model over the OpenAI API until Ctrl-C.

    Starts prefill and decode workers and a router in front of them. Without flags: one of each, with the small
    built-in model, on http://127.0.0.1:8000.

    [bold]Examples[/bold]

    [cyan]tandem serve[/cyan]

    [cyan]tandem serve --model ~/models/qwen3-4b --prefill 1 --decode 3 --gpus-per-worker 1[/cyan]

    [cyan]tandem serve --colocated --pool-bytes 2000000000 --port 8001[/cyan]

    [cyan]tandem serve --ray-address auto --host 0.0.0.0[/cyan]

    [cyan]tandem serve --config tandem.toml[/cyan]
    """
    config, files = build_config(values), from_values(RouterFiles, values)
    settings = changed_settings(config)  # before the machine fills in the others
    KV_TRANSPORTS.check(config.transfer.transport, f"transport={config.transfer.transport!r}")
    check_tiers(config.tiers, is_local=not config.ray_address)
    check_machine(config)
    if config.managed.is_managed:
        from tandem.cluster.engines.layout import check_engine  # here: --help need not wait for it

        check_engine(config)
    policies, key_file = load_tenants(files.tenants), KeyFile(files.api_key_file, config.router.audit_log)
    check_audit_log(config.router.audit_log)
    check_server_tls(config.router)
    check_tracing(is_on=config.router.tracing)
    _check_model_and_port(config)
    model = config.engine.model
    console = StatusConsole()
    with console.status(f"model {escape(model)}"):
        folder = resolve_model(
            model,
            report=lambda line: console.print(f"  {line}", markup=False, soft_wrap=True),
            needs_weights=not config.ray_address,  # on a cluster, the nodes with workers fetch them
        )
    check_model_fits(config, folder)
    name = config.engine.served_model_name or served_name(model)
    config = build_config(values | {"model": str(folder), "served_model_name": name})

    from tandem.cluster.serve import serve as launch  # late: it imports Ray, and --help need not wait

    return launch(config, policies, key_file, name_for_nodes(model), settings)


def _check_model_and_port(config: ClusterConfig) -> None:
    """Raise `ConfigError` if either or both are wrong, before anything is fetched or started."""
    reasons = []
    try:
        check_model(config.engine.model, needs_weights=not config.ray_address)
    except ConfigError as exc:
        reasons.append(exc.message)
    try:
        with listening(config.router.host, config.router.port):
            pass
    except ConfigError as exc:
        reasons.append(exc.message)
    if reasons:
        raise ConfigError("; and ".join(reasons))


def build_config(values: Values) -> ClusterConfig:
    """The whole configuration; a setting that is not given keeps its default. Raises `ConfigError`."""
    if values.get("colocated"):
        for name in _OF_TWO_ROLES:
            if name in values:
                raise ConfigError(f"colocated is one worker for both roles; leave out {name}={values[name]}")
    managed = from_values(ManagedEngineConfig, values)
    if managed.is_managed and (unused := sorted(_OWN_ENGINE_ONLY & values.keys())):
        remedy = "host_cache_gb and disk_cache_path, or its own flag" if unused[0] == "tier" else "its own flag"
        raise ConfigError(
            f"{unused[0]}={values[unused[0]]!r} is a setting of Tandem's own engine; give {managed.engine_kind} "
            f"{remedy} in engine_args"
        )
    return from_values(
        ClusterConfig,
        values,
        engine=from_values(EngineConfig, values),
        managed=managed,
        transfer=from_values(TransferConfig, values),
        tiers=from_values(TierConfig, values),
        router=from_values(RouterConfig, values),
    )

"""Generates docs/configuration.md and the configuration's part of the helm values' schema from the settings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

import msgspec

from tandem.cli.route import ADMIN_TOKEN_ENV, ROUTE_FIELDS
from tandem.cli.serve import SERVE_FIELDS
from tandem.protocol.config import (
    PANELS,
    ClusterConfig,
    EngineConfig,
    ManagedEngineConfig,
    RouterConfig,
    RouterFiles,
    TierConfig,
    TransferConfig,
)
from tandem.protocol.settings import Field, range_of, settings_of

_CHART_DECIDES = {"ray_address"}  # settings that are not helm values
HELM_COMPONENTS: dict[str, list[Field]] = {
    component: [
        field
        for config in configs
        for field in settings_of(config)
        if field.name not in _CHART_DECIDES and field.setting.command != "route"
    ]
    for component, configs in {
        "engine": (EngineConfig,),
        "transfer": (TransferConfig,),
        "tiers": (TierConfig,),
        "router": (RouterConfig, RouterFiles),
        "cluster": (ClusterConfig, ManagedEngineConfig),
    }.items()
}
# A Kubernetes service needs a fixed port. `helm --set` turns a number with a fraction into a string.
_CHART_RULES = {"port": {"minimum": 1}}
_NUMBER = {"type": ["number", "string"], "pattern": r"^[0-9.]+([eE][-+]?[0-9]+)?$"}

# Environment variables by who reads them: name and meaning.
_ENVIRONMENT = {
    "`tandem`": {
        "TANDEM_CACHE": "folder of the fetched models, the compiled kernels and the key of the KV tiers; default "
        "`~/.cache/tandem`",
        ADMIN_TOKEN_ENV: "token for `/v1/engines` of `tandem route`, where `--admin-token-file` is not given",
        "TANDEM_ENGINE_...": "keys of engines that are added over `/v1/engines`: their `api_key_env` must begin with "
        "this, or be named in the engines file",
        "OPENAI_API_KEY": "key that `tandem chat` and `tandem bench` send; default of `--api-key`",
        "CXX": "compiler of the CPU kernels at the first start; default `g++`",
        "CXXFLAGS": "more flags for it, such as another `-march`",
        "TANDEM_CPU_KERNELS": "`vectors`, `avx512_bf16` or `amx_bf16`: the kernels of bfloat16, where the hosts of a "
        "cluster have different CPUs; default: the fastest of each",
    },
    "libraries": {
        "HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE": "the model hub's own",
        "RAY_AUTH_MODE`, `RAY_AUTH_TOKEN_PATH": "Ray's own; needed with `--ray-address`, see "
        "[deployment.md](deployment.md)",
        "UCX_NET_DEVICES`, `NCCL_SOCKET_IFNAME": "network interfaces of NIXL and of nccl or gloo; on one machine "
        "Tandem sets both to `lo` unless they are set",
        "LRU_CACHE_CAPACITY`, `ONEDNN_PRIMITIVE_CACHE_CAPACITY": "sizes of torch's and oneDNN's caches, see "
        "[deployment.md](deployment.md)",
    },
    "`make` and the load test": {
        "PYTHON": "interpreter that `make` creates `.venv` with",
        "TANDEM_ALLOW_CUDA": "installs torch's CUDA build although no GPU is found",
        "TANDEM_EXTRAS": "extras of the package that `make` installs; default `worker,loadtest,report,dev`",
        "TANDEM_MODEL`, `TANDEM_MAX_TOKENS": "served model and longest answer of `make loadtest`",
    },
}

_INTRODUCTION = """\
# Configuration

<!-- Generated from the settings in protocol/config/ and cli/ by `make generated`. -->

Every setting is a flag, a key of a `--config` file and, where the table names one, a helm value. Flags win over the
file, the file over the defaults. The name is the same everywhere: the flag `--num-decode` is the key `num_decode`; a
switch such as `--autoscale` or `--no-autoscale` is `autoscale = true` or `false`. Relative paths in the file start from
the folder in which the command runs.

```toml
# tandem serve --config tandem.toml
model = "~/models/qwen3-4b"
num_prefill = 1
num_decode = 3
num_gpus_per_worker = 1
allowed_hosts = ["api.example.com"]
```

An unknown key, or a value of the wrong type or outside its range, is refused before anything starts. The error is one
line with the file, the key, the value and what it must be. [admission.md](admission.md) describes the tenants file,
[engines.md](engines.md) the engines file.
"""


def configuration_page() -> str:
    """The text of docs/configuration.md."""
    serve, route = ({field.name: field for field in fields} for fields in (SERVE_FIELDS, ROUTE_FIELDS))
    sections = {
        "`tandem serve` and `tandem route`": [field for name, field in serve.items() if name in route],
        "`tandem serve` only": [field for name, field in serve.items() if name not in route],
        "`tandem route` only": [field for name, field in route.items() if name not in serve],
    }
    lines = [_INTRODUCTION]
    for title, fields in sections.items():
        lines += [f"## {title}", "", *_table(fields), ""]
    lines += ["## Environment variables", "", "| Variable | Read by | Meaning |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {reader} | {meaning} |"
        for reader, variables in _ENVIRONMENT.items()
        for name, meaning in variables.items()
    ]
    return "\n".join(lines) + "\n"


def values_schema(committed: str) -> str:
    """The schema of helm values: the committed one, with the configuration's part replaced."""
    comment = f"make generated writes the properties of {', '.join(HELM_COMPONENTS)}"
    schema: dict[str, Any] = {"$comment": comment, **json.loads(committed)}
    for component, fields in HELM_COMPONENTS.items():
        schema["properties"][component]["properties"] = {field.name: _value_schema(field) for field in fields}
    return json.dumps(schema, indent=2) + "\n"


def _table(fields: Iterable[Field]) -> Iterator[str]:
    """One table, in which each panel of `--help` begins with a row of its name."""
    values = {field.name: f"`{name}.{field.name}`" for name, members in HELM_COMPONENTS.items() for field in members}
    yield from ("| Flag | Helm value | Default | Accepts | Meaning |", "|---|---|---|---|---|")
    by_panel: dict[str, list[Field]] = {panel: [] for panel in PANELS}
    for field in fields:
        by_panel[field.setting.panel].append(field)
    for panel, members in by_panel.items():
        if members:
            yield f"| **{panel}** | | | | |"
        for field in members:
            cells = (_flags(field), values.get(field.name, ""), _default(field), _accepts(field), _meaning(field))
            yield f"| {' | '.join(cells)} |"


def _flags(field: Field) -> str:
    names = [*field.flag.split("/"), *filter(None, [field.setting.short])]
    return ", ".join(f"`{name}`" for name in names)


def _default(field: Field) -> str:
    if field.default in ("", ()):
        return "empty"
    if field.type is bool:
        return f"`{str(field.default).lower()}`"
    return f"`{field.default:g}`" if field.type is float else f"`{field.default}`"


def _accepts(field: Field) -> str:
    if get_origin(field.type) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(field.flag_type))
    if field.type is bool:
        return "true or false"
    if field.setting.rule:
        return f"a list; each item {field.setting.rule}" if get_origin(field.type) is tuple else field.setting.rule
    return "a string" if field.type is str else range_of(field)


def _meaning(field: Field) -> str:
    """The help text without its remark on the short name, which has a place of its own."""
    return field.setting.help.replace(f"; short: {field.setting.short}", "").replace("|", "\\|")


def _value_schema(field: Field) -> dict[str, Any]:
    schema = msgspec.json.schema(field.setting.flag_type or field.checked_type)
    if field.type is float:
        schema |= _NUMBER
    # typing makes one type of `Annotated[float, Meta(le=10)]` and of the same with 10.0: the first one imported.
    schema = {key: _whole(value) for key, value in schema.items()}
    return {"description": _meaning(field), **schema, **_CHART_RULES.get(field.name, {})}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value

"""What is known about an engine before it is asked: the `--engines` file, and the body of `POST /v1/engines`.

Both have the same keys, so both go through `spec_from`. Unknown keys are errors: a mistyped one would be ignored.
A server with several data-parallel ranks becomes one engine per rank (`ranks_of`), because each has its own cache.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role
from tandem.protocol.toml_file import checked_as, read_toml

EngineKind = Literal["openai", "vllm", "sglang", "llamacpp"]

# Errors quote the description of each type: what a value must be.
_Text = Annotated[str, Meta(description="text")]
_Count = Annotated[int, Meta(ge=0, le=2**40, description="a whole number, 0 or more")]
_Port = Annotated[int, Meta(ge=0, le=65535, description="a port from 1 to 65535, or 0 for none")]
_Ranks = Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")]
_Seconds = Annotated[float, Meta(gt=0, le=1e9, description="a number of seconds above 0")]
_Gigabytes = Annotated[float, Meta(ge=0, le=1e6, description="a number of GB, 0 or more")]
_Switch = Annotated[bool, Meta(description="true or false")]
_Name = Annotated[
    str,
    Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z", description="letters, digits, '.', '_' or '-' (64 at most)"),
]
_Kind = Annotated[EngineKind, Meta(description=f"one of {', '.join(get_args(EngineKind))}")]
_EnvName = Annotated[
    str,
    Meta(
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?\Z",
        description="the name of an environment variable; put the key into one and name it here",
    ),
]
_Endpoint = Annotated[
    str, Meta(pattern=r"^((tcp|ipc)://\S+)?\Z", description="a ZMQ endpoint such as tcp://10.0.0.5:5557")
]
_File = Annotated[str, Meta(pattern=r"^[^\x00]*\Z", description="a path")]
_Headers = Annotated[dict[str, str], Meta(description="a table of strings")]

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.COLOCATED}
_RoleName = Annotated[Literal["prefill", "decode", "both"], Meta(description=f"one of {', '.join(_ROLES)}")]
_SECRETS = {"api_key_env", "headers"}  # errors do not show their values: a key may have been put there
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# The router sets these itself: they say whose request it is, how long its body is and how the connection goes on.
_OUR_HEADERS = {
    *("connection", "content-length", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "x-request-id", "x-data-parallel-rank"),
}
_TLS_FILES = ("tls_ca", "tls_cert", "tls_key")
_KINDS_WITH_ROLES = ("vllm", "sglang")
_KINDS_WITH_RANKS = ("vllm", "sglang")  # they read the rank from the header, and publish events on port + rank
_RANKED_ENDPOINT = re.compile(r"(tcp://\S+:)(\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine as it was configured. 0 or "" = ask the engine, or do without."""

    name: _Name
    url: str
    model: _Text = ""  # "" = the first of its /v1/models
    kind: _Kind = "openai"
    role: Role = Role.COLOCATED
    group: _Text = ""  # engines hand KV over within their group only
    hardware: _Text = (
        ""  # engines of one kind, hardware and model share a cost model; "cpu..." starts from slower costs
    )
    api_key_env: _EnvName = ""  # environment variable of this process that holds the engine's key
    block_size: _Count = 0
    num_blocks: _Count = 0  # capacity of its KV cache
    max_model_len: _Count = 0
    max_num_batched_tokens: _Count = 0  # tokens of one step
    kv_bytes_per_token: _Count = 0  # size of a handoff; 0 = only its latency is learned
    host_cache_gb: _Gigabytes = 0.0  # size of the host memory that its KV is offloaded to: for display and advice
    kv_events: _Endpoint = ""  # ZMQ endpoint of its KV events, such as tcp://host:5557
    kv_replay: _Endpoint = ""  # ZMQ endpoint that sends past events again
    bootstrap_port: _Port = 0  # port of an SGLang prefill server where decode servers ask for the place of its KV
    cache_salt: _Switch = True  # whether it is sent this field; if not, tenants share its prefix cache
    cache_ttl_s: _Seconds = 600.0  # without events: how long a prompt sent there counts as cached
    headers: _Headers = field(default_factory=dict, repr=False)
    tls_ca: _File = ""  # file of the CA that its certificate must be signed by; "" = that of --engine-ca
    tls_cert: _File = ""  # file of the certificate that we show it; "" = that of --engine-cert
    tls_key: _File = ""
    data_parallel_size: _Ranks = 1  # ranks of its server, which share the URL
    data_parallel_rank: int | None = None  # the rank that this engine is; set by `ranks_of` only

    @property
    def server(self) -> str:
        """Name of the server of which it is a rank, or its own name."""
        return self.name if self.data_parallel_rank is None else self.name.rpartition(".dp")[0]

    @property
    def serves_alone(self) -> bool:
        """Whether it computes prompts and decodes. An SGLang server with a role does one only."""
        return self.kind != "sglang" or self.role is Role.COLOCATED

    @property
    def cost_kind(self) -> str:
        """Name of its cost model."""
        return " ".join(word for word in (self.hardware, self.kind, self.model) if word)

    def api_key(self) -> str:
        """The engine's key, "" if it needs none. Raises `ConfigError` when the variable is not set."""
        if not self.api_key_env:
            return ""
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(
                f"engine {self.name}: api_key_env={self.api_key_env!r} is not set; export the engine's key in it"
            )
        return key

    def request_headers(self) -> dict[str, str]:
        """The headers of each request to it. Raises `ConfigError` when the variable of its key is not set."""
        key = self.api_key()
        given = self.headers | ({"authorization": f"Bearer {key}"} if key else {})
        rank = self.data_parallel_rank
        return given if rank is None else given | {"x-data-parallel-rank": str(rank)}


_TYPES = get_type_hints(EngineSpec, include_extras=True) | {"role": _RoleName}
del _TYPES["data_parallel_rank"]


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A whole `--engines` file: the engines, and the tokenizers of models by name."""

    engines: list[EngineSpec]
    tokenizers: dict[str, str]


def load_fleet(path: Path) -> FleetFile:
    """Read and check an engines file. Raises `ConfigError` naming file, key, value and remedy."""
    content = read_toml("engines", path)
    if unknown := sorted(content.keys() - {"engines", "tokenizers"}):
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known are [[engines]] and [tokenizers]")
    entries = _part(
        content, "engines", list[dict[str, Any]], [], f"{path}: engines must be tables; write [[engines]] above each"
    )
    tokenizers = _part(
        content,
        "tokenizers",
        dict[str, str],
        {},
        f'{path}: [tokenizers] must map models to folders or hub ids: "org/model" = "/folder"',
    )
    servers = [spec_from(entry, f"{path}: engines[{i}]") for i, entry in enumerate(entries)]
    engines = [rank for server in servers for rank in ranks_of(server)]
    for spec in engines:
        spec.api_key()
    try:
        for spec in engines:
            check_tokenizer(spec, tokenizers)
        check_fleet(engines)
    except ConfigError as exc:
        raise ConfigError(f"{path}: {exc.message}") from exc
    return FleetFile(engines, {model: os.path.expanduser(source) for model, source in tokenizers.items()})


def spec_from(entry: dict[str, Any], where: str) -> EngineSpec:
    """One engine out of a table or a JSON object, in which null = left out.

    Raises `ConfigError` beginning with `where`.
    """
    if unknown := sorted(entry.keys() - _TYPES.keys()):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(_TYPES)}")
    values = {name: value for name, value in entry.items() if value is not None}
    url = values["url"] = _checked_url(values.get("url"), where)
    values.setdefault("name", re.sub(r"^https?://", "", url).replace(":", "-").replace("/", "-"))
    values = {name: _checked(name, value, where) for name, value in values.items()}
    _check_headers(values.get("headers", {}), where)
    _check_tls(values, where)
    values |= {name: os.path.expanduser(values[name]) for name in _TLS_FILES if name in values}
    _check_role(values.get("role", "both"), values.get("kind"), values.get("bootstrap_port", 0), where)
    role = values.get("role", "both")
    if values.get("kv_replay") and not values.get("kv_events"):
        raise ConfigError(f"{where}: kv_replay without kv_events; give both, or neither")
    spec = EngineSpec(**(values | {"role": _ROLES[role]}))
    _check_ranks(spec, where)
    return spec


def ranks_of(server: EngineSpec) -> list[EngineSpec]:
    """The engine itself, or one engine per data-parallel rank of its server: NAME.dp0, NAME.dp1, ..."""
    if server.data_parallel_size == 1:
        return [server]
    return [
        replace(
            server,
            name=f"{server.name}.dp{rank}",
            data_parallel_rank=rank,
            kv_events=_rank_endpoint(server.kv_events, rank),
            kv_replay=_rank_endpoint(server.kv_replay, rank),
        )
        for rank in range(server.data_parallel_size)
    ]


def check_fleet(engines: Iterable[EngineSpec], *, is_complete: bool = True) -> None:
    """Raise `ConfigError` for engines that cannot be in one fleet.

    The engines of an incomplete fleet need not be able to decode: others will follow.
    """
    engines = list(engines)
    servers = {spec.server for spec in engines if spec.data_parallel_rank is not None}
    names: set[str] = set()
    groups: dict[tuple[str, str], list[EngineSpec]] = {}
    for spec in engines:
        if spec.name in names or spec.name in servers:
            raise ConfigError(f"engine name={spec.name!r} appears twice; give each engine its own name")
        names.add(spec.name)
        groups.setdefault((spec.model, spec.group), []).append(spec)
    for (model, group), members in groups.items():
        roles = {spec.role for spec in members}
        if is_complete and roles == {Role.PREFILL}:
            raise ConfigError(
                f"model {model!r} has only prefill engines in group {group!r}; nothing there can decode: "
                "add an engine with role decode or both to the group"
            )
        half = next((spec for spec in members if not spec.serves_alone), None)
        other = next((spec for spec in members if spec.serves_alone), None)
        if half is not None and other is not None:
            raise ConfigError(
                f"engine {half.name} is one half of an SGLang pair, and {other.name} of group {group!r} cannot be the "
                "other one; give each of the two kinds its own group"
            )
        if is_complete and half is not None and Role.PREFILL not in roles:
            raise ConfigError(
                f"model {model!r} has only SGLang decode engines in group {group!r}; nothing there can compute "
                "prompts: add an engine with role prefill to the group"
            )


def check_tokenizer(spec: EngineSpec, tokenizers: Container[str]) -> None:
    """Raise `ConfigError` for an engine with KV events but without tokenizer: events identify blocks by tokens."""
    if spec.kv_events and spec.model not in tokenizers:
        raise ConfigError(
            f"engine {spec.name}: kv_events={spec.kv_events!r} need model, and its tokenizer in the engines file: "
            f'[tokenizers] "{spec.model or "the model"}" = "/model/folder"'
        )


def _checked_url(url: Any, where: str) -> str:
    if url is None:
        raise ConfigError(f"{where}: url is missing; give the engine's address, such as http://10.0.0.5:8000")
    if isinstance(url, str) and re.match("https?://[^/?#]*@", url):  # NOTE: not shown, it may be a secret
        raise ConfigError(
            f"{where}: url has credentials in it; take out all up to '@' and name the variable that has the key in "
            'api_key_env, or give headers = {authorization = "Basic ..."}'
        )
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", url):
        raise ConfigError(f"{where}: url={url!r} is not of the form http://host:port")
    if not (url.isascii() and url.isprintable() and _has_address(url)):
        raise ConfigError(f"{where}: url={url!r} has no host and port that can be connected to; give http://host:port")
    return url.rstrip("/").removesuffix("/v1")


def _has_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        if "[" in parts.netloc:
            ipaddress.IPv6Address(parts.hostname or "")
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port out of range, an unbalanced bracket, or brackets around something else than an address
        return False


def _check_role(role: str, kind: str | None, bootstrap_port: int, where: str) -> None:
    if role != "both" and kind not in _KINDS_WITH_ROLES:
        raise ConfigError(
            f"{where}: role={role!r} needs kind='vllm' with its NixlConnector, or kind='sglang' started with "
            "--disaggregation-mode; other kinds have role both"
        )
    if kind == "sglang" and role == "prefill" and not bootstrap_port:
        raise ConfigError(
            f"{where}: role='prefill' of kind='sglang' needs bootstrap_port; give the server's "
            "--disaggregation-bootstrap-port"
        )
    if bootstrap_port and (kind != "sglang" or role == "both"):
        raise ConfigError(f"{where}: bootstrap_port={bootstrap_port} is for kind='sglang' with a role; leave it out")


def _check_tls(values: dict[str, Any], where: str) -> None:
    for name in _TLS_FILES:
        if values.get(name) and not values["url"].startswith("https:"):
            raise ConfigError(
                f"{where}: {name} needs https, but url={values['url']!r}; write https://, or leave it out"
            )
    for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if values.get(name) and not values.get(other):
            raise ConfigError(f"{where}: {name}={values[name]!r} is given without {other}; give both")


def _check_ranks(spec: EngineSpec, where: str) -> None:
    size = spec.data_parallel_size
    if size == 1:
        return
    if spec.kind not in _KINDS_WITH_RANKS:
        raise ConfigError(
            f"{where}: data_parallel_size={size} needs kind='vllm' or 'sglang'; other kinds have no such ranks"
        )
    ports = []
    for name in ("kv_events", "kv_replay"):
        if endpoint := getattr(spec, name):
            found = _RANKED_ENDPOINT.fullmatch(endpoint)
            if found is None or not 0 < int(found[2]) <= 65536 - size:
                raise ConfigError(
                    f"{where}: {name}={endpoint!r} is not the endpoint of rank 0 of data_parallel_size={size}; "
                    "give tcp://host:port, where rank N publishes on port + N"
                )
            ports.append(int(found[2]))
    if len(ports) == 2 and abs(ports[0] - ports[1]) < size:
        raise ConfigError(
            f"{where}: kv_events and kv_replay of data_parallel_size={size} use the same ports, because rank N uses "
            f"port + N; start the server with ports that are {size} apart"
        )


def _rank_endpoint(endpoint: str, rank: int) -> str:
    if not endpoint.startswith("tcp:"):  # a file: vLLM adds the rank to its name
        return f"{endpoint}_dp{rank}" if endpoint and rank else endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _part(content: dict[str, Any], key: str, wanted: Any, default: Any, error: str) -> Any:
    try:
        return msgspec.convert(content.get(key, default), wanted)
    except msgspec.ValidationError as exc:
        raise ConfigError(error) from exc


def _checked(name: str, value: Any, where: str) -> Any:
    """The value, if it has the type and the bounds of its field."""
    shown = name if name in _SECRETS else f"{name}={value!r}"
    return checked_as(_TYPES[name], value, f"{where}: {shown}")


def _check_headers(headers: dict[str, str], where: str) -> None:
    for name, text in headers.items():
        if name.lower() in _OUR_HEADERS:
            raise ConfigError(f"{where}: headers: {name!r} is set by the router for each request; take it out")
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):  # NOTE: not shown, it may be a secret
            raise ConfigError(
                f"{where}: headers: {name!r} cannot be sent; use letters, digits and '-' in its name and "
                "visible Latin characters in its value"
            )

"""What is known of an engine before it is asked: the `--engines` file, and the body of `POST /v1/engines`.

Both have the same keys, so both go through `spec_from`. Unknown keys are errors: a mistyped one would be ignored.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role

__all__ = [
    "EngineKind",
    "EngineSpec",
    "FleetFile",
    "check_fleet",
    "check_tokenizer",
    "load_fleet",
    "spec_from",
]

EngineKind = Literal["openai", "vllm", "sglang", "llamacpp"]

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.COLOCATED}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
# They say how this connection goes on, or how long the body is, which is for the router to say.
_OUR_HEADERS = {
    *("connection", "content-length", "expect", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
    *("upgrade", "x-request-id"),
}
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine as it was configured. 0 or "" = ask the engine, or do without."""

    name: str
    url: str
    model: str = ""  # "" = the first of its /v1/models
    kind: EngineKind = "openai"
    role: Role = Role.COLOCATED
    group: str = ""  # KV can be handed over within a group
    hardware: str = ""  # engines of one kind, hardware and model share a cost model; "cpu..." starts from slower costs
    api_key_env: str = ""  # environment variable of this process that has the engine's key
    block_size: int = 0
    num_blocks: int = 0  # capacity of its KV cache
    max_model_len: int = 0
    max_num_batched_tokens: int = 0  # tokens of one step
    kv_bytes_per_token: int = 0  # for what a handoff moves; 0 = only its latency is learned
    kv_events: str = ""  # ZMQ endpoint of its KV events, such as tcp://host:5557
    kv_replay: str = ""  # ZMQ endpoint that sends them again
    cache_salt: bool = True  # whether it is sent the field of this name; without, tenants share its prefix cache
    cache_ttl_s: float = 600.0  # without events: how long a prompt sent there counts as cached
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def cost_kind(self) -> str:
        """Name of its cost model."""
        return " ".join(word for word in (self.hardware, self.kind, self.model) if word)

    def api_key(self) -> str:
        """The engine's key, "" where it needs none. Raises `ConfigError` when the variable is not set."""
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
        return self.headers | ({"authorization": f"Bearer {key}"} if key else {})


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A whole `--engines` file: the engines, and the tokenizers of models by name."""

    engines: list[EngineSpec]
    tokenizers: dict[str, str]


def load_fleet(path: Path) -> FleetFile:
    """Read and check an engines file. Raises `ConfigError` naming file, key, value and remedy."""
    try:
        content = tomllib.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(f"engines file {path} cannot be read: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"engines file {path} is not valid TOML: {exc}") from exc
    if unknown := sorted(content.keys() - {"engines", "tokenizers"}):
        raise ConfigError(f"{path}: unknown key {unknown[0]!r}; known are [[engines]] and [tokenizers]")
    entries, tokenizers = content.get("engines", []), content.get("tokenizers", {})
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path}: engines must be tables; write [[engines]] above each")
    if not isinstance(tokenizers, dict) or not all(isinstance(value, str) for value in tokenizers.values()):
        raise ConfigError(f'{path}: [tokenizers] must map models to folders or hub ids: "org/model" = "/folder"')
    engines = [spec_from(entry, f"{path}: engines[{i}]") for i, entry in enumerate(entries)]
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
    """One engine out of a table or a JSON object. Raises `ConfigError` beginning with `where`."""
    known = {item.name: item for item in fields(EngineSpec)}
    if unknown := sorted(entry.keys() - known.keys()):
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    values = dict(entry)
    url = _checked_url(values.get("url"), where)
    values["url"] = url
    values.setdefault("name", re.sub(r"^https?://", "", url).replace(":", "-").replace("/", "-"))
    _check_types(values, where)
    _check_values(values, where)
    values["role"] = _ROLES[values.get("role", "both")]
    return EngineSpec(**values)


def check_fleet(engines: Iterable[EngineSpec]) -> None:
    """Raise `ConfigError` for engines that cannot stand beside each other."""
    names: set[str] = set()
    roles: dict[tuple[str, str], set[Role]] = {}
    for spec in engines:
        if spec.name in names:
            raise ConfigError(f"engine name={spec.name!r} is there twice; give each a name of its own")
        names.add(spec.name)
        roles.setdefault((spec.model, spec.group), set()).add(spec.role)
    for (model, group), found in roles.items():
        if found == {Role.PREFILL}:
            raise ConfigError(
                f"model {model!r} has only prefill engines in group {group!r}; nothing there can decode: "
                "add an engine with role decode or both to the group"
            )


def check_tokenizer(spec: EngineSpec, tokenizers: Container[str]) -> None:
    """Raise `ConfigError` for events that nobody could make use of: they name blocks by their tokens."""
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
    try:
        has_address = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:  # a port out of range, a bracket without its other
        has_address = False
    if not has_address or not url.isascii():
        raise ConfigError(f"{where}: url={url!r} has no host and port that can be connected to; give http://host:port")
    return url.rstrip("/").removesuffix("/v1")


def _check_types(values: dict[str, Any], where: str) -> None:
    for item in fields(EngineSpec):
        value = values.get(item.name)
        if value is None:
            continue
        if item.name == "headers":
            fits = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
            wanted = "a table of strings"
        elif item.type == "bool":
            fits, wanted = isinstance(value, bool), "true or false"
        elif item.type == "int":
            fits, wanted = isinstance(value, int) and not isinstance(value, bool) and value >= 0, "a whole number"
        elif item.type == "float":
            fits, wanted = isinstance(value, int | float) and not isinstance(value, bool) and value > 0, "a number"
        else:
            fits, wanted = isinstance(value, str), "text"
        if not fits:
            raise ConfigError(f"{where}: {item.name}={value!r} must be {wanted}")


def _check_values(values: dict[str, Any], where: str) -> None:
    if not _NAME.fullmatch(values["name"]):
        raise ConfigError(f"{where}: name={values['name']!r} must be letters, digits, '.', '_' or '-' (64 at most)")
    if values.get("kind", "openai") not in get_args(EngineKind):
        raise ConfigError(f"{where}: kind={values['kind']!r} is unknown; use {', '.join(get_args(EngineKind))}")
    if values.get("role", "both") not in _ROLES:
        raise ConfigError(f"{where}: role={values['role']!r} is unknown; use {', '.join(_ROLES)}")
    if values.get("role", "both") != "both" and values.get("kind") != "vllm":
        raise ConfigError(
            f"{where}: role={values['role']!r} needs kind='vllm' with its NixlConnector; other kinds have role both"
        )
    if values.get("api_key_env") and not _ENV_NAME.fullmatch(values["api_key_env"]):
        raise ConfigError(
            f"{where}: api_key_env is not the name of an environment variable; put the key into one and name it here"
        )
    for name, text in values.get("headers", {}).items():
        if name.lower() in _OUR_HEADERS:
            raise ConfigError(f"{where}: headers: {name!r} is set by the router for each request; take it out")
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(text):  # NOTE: not shown, it may be a secret
            raise ConfigError(
                f"{where}: headers: {name!r} cannot be sent; use letters, digits and '-' in its name and "
                "visible Latin characters in its value"
            )
    for key in ("kv_events", "kv_replay"):
        if values.get(key) and not re.fullmatch(r"(tcp|ipc)://\S+", values[key]):
            raise ConfigError(f"{where}: {key}={values[key]!r} must be a ZMQ endpoint such as tcp://10.0.0.5:5557")
    if values.get("kv_replay") and not values.get("kv_events"):
        raise ConfigError(f"{where}: kv_replay without kv_events; give both, or neither")

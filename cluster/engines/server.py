"""What one engine server is started with: plain values, and the flags that users may give it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem.protocol.config import TierConfig
from tandem.protocol.config.managed import EngineKindName
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role
from tandem.runtime.ports import bracketed

MAX_RANKS = 4096
# What to do instead of giving a flag that Tandem sets.
ADDRESS_IS_OURS = "its address is chosen on its machine: leave it out"
CONFIG_IS_OURS = "a file could set any of the flags that Tandem sets: give its flags in engine_args"
MACHINES_ARE_YOURS = "servers that span machines are not started by Tandem: start them yourself, and use tandem route"
KEY_IS_OURS = "the router reaches its servers over plain HTTP, with a key that is made at each start: leave it out"
OTHER_SERVER = "the router speaks HTTP/1.1 to its servers: leave it out"
NAME_IS_OURS = "give tandem serve --served-model-name instead"
MODEL_IS_OURS = "give tandem serve --model instead"


class Sockets(NamedTuple):
    """Where one server listens on its node. Further data-parallel ranks use the following ports."""

    http_port: int
    side_channel_port: int  # where engines ask each other for the place of their KV
    events: str  # ZMQ endpoint that the server binds
    replay: str
    engine_id: str = ""  # names this life of the server; "" = it chooses one

    def reached_at(self, endpoint: str, host: str) -> str:
        """The endpoint for a process that connects to the server."""
        return endpoint.replace("tcp://*:", f"tcp://{bracketed(host)}:")


class Parallelism(NamedTuple):
    """How many ranks of each kind a server has. Each tensor- and pipeline-parallel rank takes one GPU."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    attention: int = 1  # data-parallel ranks that share the GPUs of tensor parallelism (SGLang's DP attention)

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole server."""
        return self.tensor * self.pipeline * self.data

    @property
    def num_caches(self) -> int:
        """Ranks that requests can be sent to: each has a prefix cache and publishes its events."""
        return self.data * self.attention


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServer:
    """One server: what its actor needs to start it."""

    worker_id: str
    kind: EngineKindName
    python: str
    model: str  # local folder, or a name that its node resolves
    served_model_name: str
    arguments: tuple[str, ...]  # the user's
    parallelism: Parallelism
    is_disaggregated: bool  # whether it hands KV over to other servers
    num_gpus: float
    role: Role = Role.COLOCATED  # SGLang's servers are started for it
    host: str = ""  # address it listens at; empty = its node's
    is_local: bool = False  # whether all servers and the router are on one machine
    cpu_cores: tuple[int, ...] = ()  # cores of its own; empty = any
    log_folder: str = ""
    start_timeout_s: float = 3600.0  # to load its model and answer: the largest take most of an hour
    stall_timeout_s: float = 300.0
    host_cache_bytes: int = 0  # of host memory, for each rank that has a cache, for KV that its pool evicts
    disk_cache_path: str = ""  # folder for KV that host memory evicts
    disk_cache_bytes: int = 0  # that the folder may hold, where the engine can be told so
    api_key: str = field(default="", repr=False)


def flags_of(arguments: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """(flag, value) of a command line; the value is None for a flag that is followed by another flag or nothing.

    Flags are given in the spelling with dashes: vLLM and SGLang accept underscores too.
    """
    for i, word in enumerate(arguments):
        if not word.startswith("-") or _is_number(word):
            continue
        name, has_value, value = word.partition("=")
        following = arguments[i + 1] if i + 1 < len(arguments) else None
        if not has_value:
            is_value = following is not None and (not following.startswith("-") or _is_number(following))
            yield _dashed(name), following if is_value else None
        else:
            yield _dashed(name), value


def check_arguments(kind: str, arguments: Sequence[str], ours: Mapping[str, str], known: Collection[str] = ()) -> None:
    """Raise `ConfigError` for a flag that Tandem sets itself. `ours` maps these flags to what the user does instead.

    A flag is also refused as an abbreviation (`--kv-transfer`), with the name of a nested field
    (`--kv-transfer-config.kv_role`) and with its value glued to one letter (`-n2`), all of which argument parsers
    accept. `known` are flags that are whole, although one of ours begins with them.
    """
    for flag, _ in flags_of(arguments):
        base = flag.partition(".")[0]
        for name, remedy in ours.items():
            is_short = base not in known and len(base) > len("--x") and base.startswith("--") and name.startswith(base)
            is_glued = len(name) == len("-x") and base.startswith(name)
            if base == name or is_short or is_glued:
                raise ConfigError(f"engine_args: {flag} is set by Tandem for each {kind} server; {remedy}")


def check_host_and_disk(kind: str, tiers: TierConfig) -> None:
    """Raise `ConfigError` for a disk without host memory above it. `kind` is the server's, with its article."""
    if tiers.disk_cache_path and not tiers.host_cache_gb:
        raise ConfigError(
            f"disk_cache_path={tiers.disk_cache_path!r}: KV of {kind} server goes to its disk through host memory; "
            "give host_cache_gb too"
        )


def number_of(arguments: Sequence[str], *names: str) -> int:
    """The value of a flag that counts ranks, 1 if it is not given. Raises `ConfigError` for another value."""
    number = 1
    for flag, value in flags_of(arguments):
        if flag in names:
            if value is None or not value.isdecimal() or not 1 <= int(value) <= MAX_RANKS:
                raise ConfigError(f"engine_args: {flag} {value or ''} must be a whole number from 1 to {MAX_RANKS}")
            number = int(value)
    return number


def _dashed(flag: str) -> str:
    name, dot, rest = flag.partition(".")
    return name.replace("_", "-") + dot + rest


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True

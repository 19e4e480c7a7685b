"""What a tier is: a kind of store, its place, its size and the form of its blocks, as one text.

    host:64GB   numa:2?gb=256   dax:/dev/dax0.0?gb=512   disk:/ssd/kv?gb=2000&codec=int8   s3://bucket/prefix?gb=9000

`tandem.protocol.plugins` knows the kinds; here is only the form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import POOL_PLACE
from tandem.protocol.plugins import OBJECT_SCHEMES

OBJECT_TIER = "object"  # the name of a bucket that is given none, whichever cloud has it
# Kinds whose blocks are in memory that one worker alone uses: it vouches for their bytes, and peers may read them.
MEMORY_SCHEMES = ("host", "numa", "dax")
COMMON_OPTIONS = ("gb", "name", "codec", "eviction")
_MAX_GB = 1_000_000
_SCHEME = re.compile(r"[a-z][a-z0-9.-]{0,31}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_TAKEN = (POOL_PLACE, "peer", "computed")  # other sources of tokens
_SIZE = re.compile(r"([0-9.]+)(GB)?", re.IGNORECASE)
_EXAMPLES = "host:64GB, disk:/ssd/kv?gb=2000 or s3://bucket/prefix?gb=9000"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec:
    """One tier. `gb` counts 10^9 bytes of encoded blocks; of memory, in each worker."""

    scheme: str
    place: str  # what follows the scheme: a folder, a device, a NUMA node, //bucket/prefix
    gb: float
    name: str
    codec: str = "raw"
    eviction: str
    setting: str  # what errors call it
    options: dict[str, str] = field(default_factory=dict)  # of its kind

    @property
    def url(self) -> str:
        """Scheme and place."""
        return f"{self.scheme}:{self.place}"

    @property
    def is_memory(self) -> bool:
        """Whether its blocks are in memory of one worker. All other blocks are sealed."""
        return self.scheme in MEMORY_SCHEMES


def parse_tier(text: str, *, eviction: str) -> TierSpec:
    """The tier that a text describes; `eviction` is used where it names no policy. Raises `ConfigError`."""
    setting = f"tier={text!r}"
    scheme, colon, rest = text.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        raise ConfigError(f"{setting} must begin with a kind of store, such as {_EXAMPLES}")
    place, _, query = rest.partition("?")
    options = _options(setting, query)
    if scheme == "host" and place:
        if "gb" in options or not (size := _SIZE.fullmatch(place)):
            raise ConfigError(f"{setting} must be host memory with one size, such as host:64GB")
        place, options["gb"] = "", size[1]
    name = options.pop("name", OBJECT_TIER if scheme in OBJECT_SCHEMES else scheme)
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(
            f"{setting}: name={name!r} must be at most 32 letters, digits, '_', '-' and '.', and none of "
            f"{', '.join(_TAKEN)}; choose another name"
        )
    return TierSpec(
        scheme=scheme,
        place=place,
        gb=_gigabytes(setting, options.pop("gb", "")),
        name=name,
        codec=options.pop("codec", "raw"),
        eviction=options.pop("eviction", eviction),
        setting=setting,
        options=options,
    )


def check_names(specs: tuple[TierSpec, ...]) -> None:
    """Raise `ConfigError` if two tiers have one name."""
    first: dict[str, TierSpec] = {}
    for spec in specs:
        other = first.setdefault(spec.name, spec)
        if other is not spec:
            raise ConfigError(
                f"{other.setting} and {spec.setting} are both named {spec.name!r}; give one of them another name, "
                f"such as &name={spec.name}2"
            )


def _options(setting: str, query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as exc:
        raise ConfigError(f"{setting}: {query!r} must be options such as gb=64&codec=int8") from exc
    options = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{setting} has an option twice; leave one out")
    return options


def _gigabytes(setting: str, text: str) -> float:
    if not text:
        raise ConfigError(f"{setting} has no size: say how many GB it may hold, as gb=64")
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size <= _MAX_GB:
        raise ConfigError(f"{setting}: gb={text!r} must be a number of GB above 0 and at most {_MAX_GB}")
    return size

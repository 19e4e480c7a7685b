"""Settings: configuration fields described well enough to become a flag, a line of a file and a line of a reference.

    port: Annotated[int, Meta(ge=0, le=65535), Setting("TCP port; 0 = any free one.", HTTP)] = 8000

msgspec checks the type and the bounds in `Meta`. Flags, TOML files, the schema of helm values and docs/configuration.md
are all made from these annotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from tandem.protocol.errors import ConfigError

Config = TypeVar("Config")

_NOUNS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
_UNITS = {"_s": " seconds", "_gb": " GB", "_bytes": " bytes", "_tokens": " tokens"}


@dataclass(frozen=True, slots=True)
class Setting:
    """How a field is presented to users, and the check beyond its type and bounds."""

    help: str
    panel: str  # heading in `--help` and in the reference
    metavar: str = ""  # name of the value in `--help`; empty = its type
    flag: str = ""  # empty = made from the field's name
    short: str = ""  # second name of the flag
    flag_type: Any = None  # type for flags, files and helm values, if they accept less than the field
    is_valid: Callable[[Any], bool] | None = None  # for a tuple: of each item
    rule: str = ""  # what a value must be, if type and bounds do not say it
    command: Literal["", "serve", "route"] = ""  # the only command that has it; "" = all that read its class


@dataclass(frozen=True, slots=True)
class Field:
    """A setting of one configuration class, resolved."""

    name: str
    type: Any  # without annotations
    checked_type: Any  # with msgspec's bounds
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        """Name on the command line; for a switch, with the name that turns it off."""
        name = f"--{self.name.replace('_', '-')}"
        return self.setting.flag or (f"{name}/--no-{name[2:]}" if self.type is bool else name)

    @property
    def is_path(self) -> bool:
        """Whether the value names a file or a folder."""
        return self.setting.metavar in ("FILE", "FOLDER")

    @property
    def flag_type(self) -> Any:
        """Type of the value that flags, files and helm values accept."""
        return self.setting.flag_type or self.type


_resolved: dict[type[Any], tuple[Field, ...]] = {}


def settings_of(config: type[Any]) -> tuple[Field, ...]:
    """The fields of a configuration class that have a `Setting`, in their order."""
    if config not in _resolved:
        _resolved[config] = tuple(_resolve(config))
    return _resolved[config]


def _resolve(config: type[Any]) -> Iterator[Field]:
    annotated, plain = get_type_hints(config, include_extras=True), get_type_hints(config)
    for item in fields(config):
        notes = get_args(annotated[item.name]) if get_origin(annotated[item.name]) is Annotated else ()
        for note in notes:
            if isinstance(note, Setting):
                assert item.default is not MISSING, f"{config.__name__}.{item.name} is a setting without a default"
                yield Field(item.name, plain[item.name], annotated[item.name], item.default, note)


def changed_settings(*configs: Any) -> dict[str, str]:
    """The settings of these configurations, and of their parts, that differ from their defaults: flag -> value.

    They are shown to operators. A switch has no value. Flags that are passed on to another program may hold a key, so
    they are only said to be given.
    """
    changed: dict[str, str] = {}
    for config in configs:
        for field in settings_of(type(config)):
            if (value := getattr(config, field.name)) != field.default:
                on, _, off = field.flag.partition("/")
                is_off = field.type is bool and not value
                shown = "" if field.type is bool else "(given)" if field.setting.metavar == "FLAGS" else str(value)
                changed[off if is_off else field.setting.short or on] = shown
        parts = (getattr(config, item.name) for item in fields(config))
        changed |= changed_settings(*(part for part in parts if is_dataclass(part)))
    return changed


def check_settings(config: object) -> None:
    """Raise `ConfigError` for the first setting of this object that is not valid."""
    for field in settings_of(type(config)):
        checked(field, getattr(config, field.name))


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError` with this message unless the condition on several settings holds."""
    if not condition:
        raise ConfigError(message)


def from_values(config: type[Config], values: Mapping[str, Any], **parts: object) -> Config:
    """A configuration from settings by name and from its parts; settings that are not given keep their defaults."""
    given = {field.name: checked(field, values[field.name]) for field in settings_of(config) if field.name in values}
    return config(**given, **parts)


def checked(field: Field, value: Any, *, where: str = "") -> Any:
    """The value in the field's own type. Raises `ConfigError`, which starts with `where`, for one that is not valid."""
    is_valid = field.setting.is_valid
    try:
        converted = msgspec.convert(value, field.checked_type)
    except (msgspec.ValidationError, UnicodeEncodeError) as exc:  # the latter for bytes that are not UTF-8 in a flag
        raise ConfigError(f"{where}{field.name}={value!r} must be {rule_of(field, value)}") from exc
    if isinstance(converted, str) and not _is_text(converted):
        raise ConfigError(f"{where}{field.name}={value!r} must be text in UTF-8 without the character \\0")
    if is_valid is not None and isinstance(converted, tuple):
        for item in converted:
            if not is_valid(item):
                raise ConfigError(f"{where}{field.name}: {item!r} must be {field.setting.rule}")
    elif is_valid is not None and not is_valid(converted):
        raise ConfigError(f"{where}{field.name}={value!r} must be {field.setting.rule}")
    return converted


def _is_text(value: str) -> bool:
    """Whether the value can be a path, and can be sent: a flag may have bytes that are not UTF-8, a file \\u0000."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def rule_of(field: Field, value: object) -> str:
    """What a value of this field must be; with its type, if this value has another."""
    if get_origin(field.type) is Literal:
        return f"one of {', '.join(map(str, get_args(field.flag_type)))}"
    if get_origin(field.type) is tuple:
        return "a list of strings"
    if field.setting.rule:
        return field.setting.rule
    if field.type in (bool, str):
        return _NOUNS[field.type]
    has_type = type(value) is field.type or (field.type is float and type(value) is int)
    return range_of(field) if has_type else f"{_NOUNS[field.type]} {range_of(field)}"


def range_of(field: Field) -> str:
    """The bounds of a number, with its unit."""
    bounds = bounds_of(field)
    unit = next((unit for suffix, unit in _UNITS.items() if field.name.endswith(suffix)), "")
    interval = f"from {_plain(bounds.ge)} to" if bounds.gt is None else f"above {_plain(bounds.gt)} and at most"
    return f"{interval} {_plain(bounds.le)}{unit}"


def bounds_of(field: Field) -> msgspec.Meta:
    """The lower bound of a number, which is `ge` or `gt`, and its upper bound `le`."""
    return next(note for note in get_args(field.checked_type) if isinstance(note, msgspec.Meta))


def _plain(bound: float | None) -> str:
    assert bound is not None, "a number has a lower and an upper bound"
    return f"{bound:.0f}" if bound == int(bound) else f"{bound:g}"

"""Turns the settings of configuration classes into the flags of a command and the keys of its `--config` file."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, get_origin

import typer

from tandem.protocol.config import PANELS
from tandem.protocol.config.panels import TIERS
from tandem.protocol.errors import ConfigError
from tandem.protocol.settings import Field, checked, settings_of
from tandem.protocol.toml_file import read_toml
from tandem.protocol.user_file import expanded

Values = dict[str, Any]  # settings by name

_CONFIG_HELP = "TOML file of settings: docs/configuration.md. A flag wins over the file."


def with_settings(
    fields: Sequence[Field], *, overrides: Mapping[str, Sequence[str]] | None = None
) -> Callable[[Callable[[Values], int]], Callable[..., int]]:
    """Make a function of settings a command that has a flag for each of these fields, and `--config`.

    The function gets the settings that were given; those of flags win over those of the file. A flag named in
    `overrides` also replaces these other settings of the file, unless it turns something off.
    """

    def decorate(run: Callable[[Values], int]) -> Callable[..., int]:
        def command(ctx: typer.Context, config: str, **flags: Any) -> int:
            given = {name: value for name, value in flags.items() if _is_given(ctx, name)}
            is_file_given = _is_given(ctx, "config")  # an empty name is a variable that is not set, not "no file"
            from_file = read_config_file(expanded("config", config), fields) if is_file_given else {}
            return run(_expanded(fields, _merge(given, from_file, overrides or {})))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        # typer reads a command's flags from its signature, as `inspect.signature` finds it.
        command.__signature__ = inspect.Signature(list(_parameters(fields)))  # type: ignore[attr-defined]
        return command

    return decorate


def fields_by_panel(command: str, *configs: type[Any]) -> list[Field]:
    """The settings of these classes that the command has, in the order of `--help`."""
    fields = (field for config in configs for field in settings_of(config))
    return sorted(
        (field for field in fields if field.setting.command in ("", command)),
        key=lambda field: PANELS.index(field.setting.panel),
    )


def read_config_file(path: str, fields: Sequence[Field]) -> Values:
    """The settings in a TOML file. Raises `ConfigError` with file, key, value and remedy."""
    content = read_toml("config", path)
    known = {field.name: field for field in fields}
    for key, value in content.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r} with value {value!r}; {_hint(key, value, known)}")
    return {key: _from_file(known[key], value, f"{path}: ") for key, value in content.items()}


def _merge(given: Values, from_file: Values, overrides: Mapping[str, Sequence[str]]) -> Values:
    replaced = {other for name, others in overrides.items() if given.get(name) not in (None, False) for other in others}
    return {name: value for name, value in from_file.items() if name not in replaced} | given


def _from_file(field: Field, value: Any, where: str) -> Any:
    """The value in the field's own type. Raises `ConfigError`."""
    if field.setting.flag_type is not None:
        checked(replace(field, checked_type=field.flag_type), value, where=where)
    return checked(field, value, where=where)


def _expanded(fields: Sequence[Field], values: Values) -> Values:
    """The settings with ~ expanded in paths, because not every shell expands it after `--flag=`. Raises `ConfigError`.

    Paths of tiers are left to the nodes of a cluster: each has a home folder of its own.
    """
    is_on_nodes = bool(values.get("ray_address"))
    paths = {field.name for field in fields if field.is_path and not (is_on_nodes and field.setting.panel == TIERS)}
    return {name: expanded(name, value) if name in paths else value for name, value in values.items()}


def _hint(key: str, value: object, known: Mapping[str, Field]) -> str:
    if isinstance(value, dict):
        return "write all settings at the top level, without tables"
    word = key.replace("-", "_")
    named = [field.name for field in known.values() if field.setting.short.lstrip("-").replace("-", "_") == word]
    close = named or difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "keys are the names of flags, with _ for -: see --help"


def _parameters(fields: Sequence[Field]) -> Iterator[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("ctx", kind, annotation=typer.Context)
    for field in fields:
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        yield inspect.Parameter(field.name, kind, default=default, annotation=Annotated[_type(field), _option(field)])
    option = typer.Option(help=_CONFIG_HELP, metavar="FILE")
    yield inspect.Parameter("config", kind, default="", annotation=Annotated[str, option])


def _type(field: Field) -> Any:
    return list[str] if get_origin(field.type) is tuple else field.flag_type


def _option(field: Field) -> Any:
    setting = field.setting
    return typer.Option(
        field.flag,
        help=setting.help,
        rich_help_panel=setting.panel,
        metavar=setting.metavar or None,
    )


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"

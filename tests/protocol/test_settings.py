"""Every setting has a help text and a range, and every value outside of it is refused in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

from tandem.cli.route import ROUTE_FIELDS
from tandem.cli.serve import SERVE_FIELDS
from tandem.protocol.config import (
    PANELS,
    ClusterConfig,
    EngineConfig,
    ExternalEnginesConfig,
    ManagedEngineConfig,
    RouterConfig,
    RouterFiles,
    TierConfig,
    TransferConfig,
    cache_folder,
)
from tandem.protocol.errors import ConfigError
from tandem.protocol.settings import Field, bounds_of, changed_settings, checked, from_values, settings_of

CONFIGS = (EngineConfig, TransferConfig, TierConfig, RouterConfig, RouterFiles, ExternalEnginesConfig, ClusterConfig)
FIELDS = {field.name: field for field in (*SERVE_FIELDS, *ROUTE_FIELDS)}
NUMBERS = [field for field in FIELDS.values() if field.type in (int, float)]


def wrong_values(field: Field) -> Iterator[Any]:
    """Values of other types, and those next to the bounds."""
    yield from (None, {}, object())
    if field.type is not str:
        yield from ("", "1", "\udcff")
    if field.type is not bool:
        yield from (True, False)
    if field.type not in (int, float):
        yield from (1, 1.0)
        return
    bounds = bounds_of(field)
    yield from (math.nan, math.inf, -math.inf, 10**400, -(10**30))
    yield bounds.gt if bounds.gt is not None else bounds.ge - 1  # type: ignore[operator]
    yield bounds.le + 1  # type: ignore[operator]
    if field.type is int:
        yield 1.5


@pytest.mark.parametrize("name", FIELDS)
def test_values_outside_of_type_and_range_are_refused_by_name_and_value(name: str) -> None:
    field = FIELDS[name]
    for value in wrong_values(field):
        with pytest.raises(ConfigError) as raised:
            checked(field, value)
        assert raised.value.message.startswith(f"{name}={value!r} must be ")
        assert "\n" not in raised.value.message


@pytest.mark.parametrize("field", NUMBERS, ids=lambda field: field.name)
def test_bounds_themselves_are_accepted(field: Field) -> None:
    bounds = bounds_of(field)
    for bound in (bounds.ge, bounds.le):
        if bound is not None:
            assert checked(field, field.type(bound)) == bound


def test_a_configuration_refuses_what_its_settings_refuse() -> None:
    for config in CONFIGS:
        for field in settings_of(config):
            parts = {"engine": EngineConfig()} if config is ClusterConfig else {}
            value = object()
            with pytest.raises(ConfigError, match=f"^{field.name}="):
                config(**parts, **{field.name: value})


@pytest.mark.parametrize("field", FIELDS.values(), ids=lambda field: field.name)
def test_every_setting_is_described(field: Field) -> None:
    assert field.setting.panel in PANELS
    assert field.setting.help.endswith(".")
    assert "\n" not in field.setting.help
    assert field.type in (int, float, bool, str) or get_origin(field.type) in (tuple, Literal)
    assert checked(field, field.default) == field.default


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_cpus_per_worker", -1, "num_cpus_per_worker=-1 must be a whole number or a share of one, from 0 to 4096"),
        ("num_gpus_per_worker", 1.5, "num_gpus_per_worker=1.5 must be a whole number or a share of one, from 0 to"),
        ("router_processes", 0, "router_processes=0 must be from 1 to 64"),
        ("handoff_timeout_s", math.nan, "handoff_timeout_s=nan must be above 0 and at most 86400 seconds"),
        ("lease_ttl_s", "2", "lease_ttl_s='2' must be a number above 0 and at most 86400 seconds"),
        ("pin_share", 1, "pin_share=1 must be from 0 to 0.9"),
        ("max_body_bytes", True, "max_body_bytes=True must be a whole number from 1 to 1099511627776 bytes"),
        ("block_size", 24, "block_size=24 must be a power of two from 1 to 256"),
        ("dtype", "int3", "dtype='int3' must be one of auto, float32, bfloat16"),
        ("model", "", "model='' must be a folder, a hub id or a built-in name"),
        ("colocated", 1, "colocated=1 must be true or false"),
        ("allowed_hosts", "a", "allowed_hosts='a' must be a list of strings"),
        ("allowed_hosts", ["a", "b c"], "allowed_hosts: 'b c' must be one host name such as api.example.com"),
    ],
)
def test_errors_say_what_a_value_must_be(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked(FIELDS[name], value)
    assert raised.value.message.startswith(expected)


def test_values_come_in_the_fields_own_type() -> None:
    config = from_values(RouterConfig, {"keep_alive_timeout_s": 3, "allowed_hosts": ["a", "b"], "unrelated": 1})
    assert (config.keep_alive_timeout_s, config.allowed_hosts) == (3.0, ("a", "b"))
    assert isinstance(config.keep_alive_timeout_s, float)


@pytest.mark.parametrize(("value", "folder"), [("", ".cache/tandem"), (None, ".cache/tandem"), ("~/models", "models")])
def test_cache_folder_is_in_the_home_folder(value: str | None, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    if value is not None:
        monkeypatch.setenv("TANDEM_CACHE", value)
    assert cache_folder() == Path("/home/somebody") / folder


def test_changed_settings_are_named_without_what_may_be_a_key() -> None:
    config = ClusterConfig(
        engine=EngineConfig(),
        num_prefill=2,
        autoscale=False,
        managed=ManagedEngineConfig(engine_kind="vllm", engine_args="--api-key secret"),
        router=RouterConfig(port=8001),
    )
    named = {"--prefill": "2", "--no-autoscale": "", "--engine": "vllm", "--engine-args": "(given)", "--port": "8001"}
    assert changed_settings(config) == named
    assert changed_settings(ClusterConfig(engine=EngineConfig())) == {}

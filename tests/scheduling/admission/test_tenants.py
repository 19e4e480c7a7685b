from __future__ import annotations

from pathlib import Path

import pytest

from tandem.protocol.errors import ConfigError
from tandem.scheduling.admission.tenants import CacheScopes, PinQuotas, TenantPolicy, Tenants, load_tenants


def write(folder: Path, text: str) -> str:
    path = folder / "tenants.toml"
    path.write_text(text)
    return str(path)


def test_policies_come_from_the_file_and_missing_values_from_its_default(tmp_path: Path) -> None:
    tenants = load_tenants(
        write(tmp_path, "[default]\nttft_slo_ms = 5000\n[tenants.search]\nweight = 4\nmax_queue_share = 0.5\n")
    )
    assert tenants.policy("search") == TenantPolicy(weight=4.0, ttft_slo_s=5.0, max_queue_share=0.5)
    assert tenants.policy("anyone") == TenantPolicy(ttft_slo_s=5.0)
    assert [tenants.label(name) for name in ("search", "default", "anyone")] == ["search", "default", "other"]


def test_tenants_may_be_restricted_to_workers_and_share_their_caches(tmp_path: Path) -> None:
    text = '[default]\nshared_cache = true\nworkers = ["*-0"]\n[tenants.a]\nshared_cache = false\n'
    tenants = load_tenants(write(tmp_path, text + '[tenants.b]\nworkers = ["prefill-1", "decode-*"]\n'))
    policies = [tenants.policy(name) for name in ("anyone", "a", "b")]
    assert [policy.workers for policy in policies] == [("*-0",), ("*-0",), ("prefill-1", "decode-*")]
    assert [policy.shared_cache for policy in policies] == [True, False, True]
    scopes = CacheScopes(tenants, has_keys=True)
    assert scopes.of("anyone", "s") == scopes.of("b", "s") != scopes.of("a", "s")
    assert "" not in {scopes.of(name, "") for name in ("anyone", "a", "b")}  # so that an engine is always told one


def test_tenants_share_nothing_by_default_and_everything_without_keys() -> None:
    names, salts = ("a", "b", "default"), ("", "s")
    assert len({CacheScopes(Tenants(), has_keys=True).of(name, salt) for name in names for salt in salts}) == 6
    assert len({CacheScopes(Tenants(), has_keys=False).of(name, salt) for name in names for salt in salts}) == 2


def test_quotas_of_pins_are_in_a_table_of_their_own(tmp_path: Path) -> None:
    tenants = load_tenants(write(tmp_path, "[pins]\nmax_pins = 7\nmax_pin_ttl_s = 60\n"))
    assert tenants == Tenants(pins=PinQuotas(max_pins=7, max_pin_ttl_s=60.0))


def test_without_a_file_all_are_alike() -> None:
    assert load_tenants("") == Tenants()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\nweight = 0", r"tenants.toml: default.weight = 0 must be a number above 0.*such as 1.0"),
        ("[default]\nweight = true", "default.weight = True must be"),
        ("[tenants.a]\nweight = nan", "tenants.a.weight = nan must be"),
        ("[tenants.a]\nttft_slo_ms = 'soon'", "tenants.a.ttft_slo_ms = 'soon' must be milliseconds"),
        ("[tenants.a]\nmax_queue_share = 1.5", "tenants.a.max_queue_share = 1.5 must be above 0, at most 1"),
        ("[tenants.a]\nwieght = 1", "tenants.a.wieght is unknown; use weight, ttft_slo_ms, itl_slo_ms"),
        ("[tenants.a]\nworkers = 'decode-0'", "tenants.a.workers = 'decode-0' must be a list of worker ids"),
        ("[tenants.a]\nshared_cache = 'team'", "tenants.a.shared_cache = 'team' must be true or false"),
        ("[tenants.a]\nshared_cache = 1", "tenants.a.shared_cache = 1 must be true or false"),
        ("[tenants.a]\nworkers = []", "tenants.a.workers = .. must be a list"),
        ("[tenants.a]\nworkers = ['d', 3]", "tenants.a.workers = .'d', 3. must be a list"),
        ("[tenants.'a b']\nweight = 1", "tenants.'a b' must be 1 to 64 letters"),
        ("[tennants.a]\nweight = 1", r"tennants is unknown; use \[default\], \[tenants.NAME\] and \[pins\]"),
        ("tenants = 3", "tenants = 3 must be tables"),
        ("default = 3", "default = 3 must be a table"),
        ("[pins]\nmax_pins = -1", "pins.max_pins = -1 must be a whole number from 0 to 16777216"),
        ("[pins]\npin_tenant_share = 0", "pins.pin_tenant_share = 0 must be above 0, at most 1"),
        ("[pins]\nmax_pin_ttl_s = inf", "pins.max_pin_ttl_s = inf must be seconds above 0, at most 31622400"),
        ("[pins]\nmax_pin_ttl_s = nan", "pins.max_pin_ttl_s = nan must be seconds above 0"),
        ("[pins]\npin_share = 0.5", "pins.pin_share is unknown; use max_pins, max_pins_per_tenant"),
        ("pins = 3", "pins = 3 must be a table"),
        ("weight = ", "is not valid TOML"),
        ("# later", "is empty; write .default., .tenants.NAME. or .pins., or leave the file out"),
    ],
)
def test_a_bad_file_is_reported_with_key_value_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_tenants(write(tmp_path, text))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml' cannot be read: No such file"):
        load_tenants(str(tmp_path / "nowhere.toml"))

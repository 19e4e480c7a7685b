from __future__ import annotations

from typing import Any

import pytest

from tandem.router.engines.engine_status import (
    MAX_ADAPTERS,
    MAX_COUNT,
    MAX_LINES,
    MAX_SAMPLES,
    CacheSize,
    ReportedLoad,
    parse_cache_size,
    parse_load,
    parse_report,
    served_model,
)

VLLM = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:cache_config_info{block_size="128",cache_dtype="auto",num_gpu_blocks="364"} 1.0
"""
SGLANG = 'sglang:num_running_reqs{m="a"} 1\nsglang:num_queue_reqs{m="a"} 2\nsglang:token_usage{m="a"} 0.1\n'
LLAMACPP = "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VLLM, ReportedLoad(5, 4, 0.5)),
        (SGLANG, ReportedLoad(1, 2, 0.1)),
        (LLAMACPP, ReportedLoad(1, 0, 0.0)),
        ("process_cpu_seconds_total 3\n", None),
        ("vllm:num_requests_running{} many\n", None),
        ('vllm:num_requests_running NaN\nvllm:num_requests_running{a="b} 1\n', None),
        ("vllm:num_requests_running 2\nvllm:num_requests_waiting +Inf\n", ReportedLoad(2, 0, 0.0)),
        ("", None),
    ],
)
def test_load_of_every_kind(text: str, expected: ReportedLoad | None) -> None:
    assert parse_load(text) == expected


def test_the_load_of_one_rank() -> None:
    assert parse_load(VLLM, 0) == ReportedLoad(3, 4, 0.25)
    assert parse_load(VLLM, 1) == ReportedLoad(2, 0, 0.5)
    assert parse_load(VLLM, 2) is None
    text = 'sglang:num_running_reqs{dp_rank="1"} 5\nsglang:num_running_reqs{dp_rank="0"} 6\n'
    assert parse_load(text, 1) == (5, 0, 0)
    assert parse_load(SGLANG, 1) == ReportedLoad(1, 2, 0.1)  # it does not say whose they are
    sizes = "".join(
        f'vllm:cache_config_info{{block_size="16",engine="{i}",num_gpu_blocks="{i}00"}} 1\n' for i in (1, 2)
    )
    assert parse_cache_size(sizes, 2) == CacheSize(16, 200)


def test_the_cache_size_if_it_is_reported() -> None:
    assert parse_cache_size(VLLM) == CacheSize(128, 364)
    assert parse_cache_size('vllm:cache_config_info{block_size="None"} 1\n') == CacheSize(0, 0)
    assert parse_cache_size(SGLANG) == CacheSize(0, 0)


def test_adapters_are_the_models_with_a_parent() -> None:
    adapters = [{"id": name, "root": f"/{name}", "parent": "a"} for name in ("sql", "chat", "", "x" * 600)]
    catalog = {"data": [*adapters, {"id": "a", "parent": None}, {"id": "b", "parent": ""}]}
    assert served_model(catalog, "") == ("a", 0, ("chat", "sql"), None)
    assert served_model(catalog, "b").adapters == ("chat", "sql")
    with pytest.raises(LookupError, match="it serves a, b"):
        served_model(catalog, "sql")
    many = [{"id": f"lora{i}", "parent": "a"} for i in range(2000)]
    assert len(served_model({"data": [*many, {"id": "a"}]}, "").adapters) == MAX_ADAPTERS


def test_the_wanted_model_or_the_first() -> None:
    catalog = {"data": [{"id": "a", "max_model_len": 10}, {"id": "b"}]}
    assert served_model(catalog, "") == ("a", 10, (), None)
    assert served_model(catalog, "b") == ("b", 0, (), None)
    with pytest.raises(LookupError, match="it serves a, b"):
        served_model(catalog, "c")
    for junk in (None, [], {"data": None}, {"data": 5}, {"data": {"id": "a"}}, {"data": [{"id": 3}]}):
        with pytest.raises(LookupError, match="no model"):
            served_model(junk, "")


@pytest.mark.parametrize(
    ("capabilities", "is_used"), [({"chat": True}, True), ({}, True), (["chat"], False), ({"chat": "x" * 9000}, False)]
)
def test_capabilities_are_those_on_the_card_if_they_can_be(capabilities: object, is_used: bool) -> None:
    catalog = {"data": [{"id": "a", "capabilities": capabilities}]}
    assert served_model(catalog, "").capabilities == (capabilities if is_used else None)


@pytest.mark.parametrize("value", ["1e300", "1e308", "-5", "-1e300", "NaN", "+Inf", "9" * 400, "1"])
def test_any_number_that_an_engine_reports_can_be_added_up_and_shown(value: str) -> None:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    load = parse_load("".join(f'{name}{{engine="{rank}"}} {value}\n' for name in names for rank in range(3)))
    if load is not None:
        assert 0 <= load.num_running <= MAX_COUNT
        assert 0 <= load.num_waiting <= MAX_COUNT
        assert 0 <= load.kv_usage <= 1
    sizes = f'vllm:cache_config_info{{block_size="{"9" * 5000}",num_gpu_blocks="16"}} 1\n'
    assert parse_cache_size(sizes) == (0, 16)
    assert all(0 <= number <= MAX_COUNT for number in parse_cache_size(f"sglang:num_pages {value}\n"))


@pytest.mark.parametrize("name", ["", "\ud800", "a\nb", "\x1b[2J", "m" * 10_000, 7, None])
def test_a_model_whose_name_cannot_be_shown_is_not_served(name: Any) -> None:
    cards = [{"id": name, "object": "model"}, {"id": "good", "max_model_len": 10**30}]
    assert served_model({"data": cards}, "") == ("good", MAX_COUNT, (), None)
    with pytest.raises(LookupError, match="no model"):
        served_model({"data": cards[:1]}, "")


@pytest.mark.parametrize("found", [{"a": "\ud800"}, {"a": "b" * 10_000}, ["a"]])
def test_capabilities_that_cannot_be_shown_are_left_out(found: Any) -> None:
    assert served_model({"data": [{"id": "m", "capabilities": found}]}, "").capabilities is None


def load_of(num_samples: int) -> str:
    return "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(num_samples))


def test_samples_are_found_wherever_the_text_is_cut() -> None:
    text = "".join(f'# {"x" * (i % 300)}\nvllm:num_requests_running{{a="{i}"}} 1\n' for i in range(2000)).rstrip("\n")
    assert parse_load(text) == ReportedLoad(2000, 0, 0.0)


def test_an_exposition_that_would_take_long_is_refused() -> None:
    assert parse_load(load_of(MAX_SAMPLES)) == ReportedLoad(MAX_SAMPLES, 0, 0.0)
    with pytest.raises(ValueError, match=f"more than {MAX_SAMPLES} samples"):
        parse_load(load_of(MAX_SAMPLES + 1))
    with pytest.raises(ValueError, match=f"more than {MAX_LINES} lines"):
        parse_load("\n" * (MAX_LINES + 1))


def test_a_line_that_would_take_long_is_skipped() -> None:
    labels = ",".join(f'a{i}="b"' for i in range(100_000))
    assert parse_load(f"vllm:num_requests_running{{{labels}}} 5\nvllm:num_requests_running 1\n") == (1, 0, 0.0)


def test_a_time_stamp_that_overflows_is_skipped_with_its_line() -> None:
    assert parse_load(f"vllm:num_requests_running 5 {'9' * 400}\nvllm:num_requests_running 1\n") == (1, 0, 0.0)


def test_not_all_models_are_named_in_an_error() -> None:
    catalog = {"data": [{"id": f"m{i}"} for i in range(10_000)]}
    with pytest.raises(LookupError, match=r"^it serves m0, m1, .*m7, \.\.\.$"):
        served_model(catalog, "other")


def test_sglang_names_its_tiers_otherwise() -> None:
    name = "sglang:cached_tokens_total"
    rows = [("0", "device", 900), ("0", "host", 64), ("1", "host", 8), ("1", "storage", 16), ("1", "total", 3)]
    text = "".join(f'{name}{{dp_rank="{rank}",cache_source="{source}"}} {count}.0\n' for rank, source, count in rows)
    assert parse_report(text).loaded_tokens == {"host": 72, "disk": 16}
    assert parse_report(text, 0).loaded_tokens == {"host": 64}


def test_tokens_that_came_from_tiers_are_read_by_rank() -> None:
    name = "vllm:prompt_tokens_cached_by_source_total"
    rows = [
        ("0", "device", 900),
        ("0", "host", 64),
        ("0", "disk", 16),
        ("1", "host", 8),
        ("1", "p2p", 7),
        ("1", "x", 3),
    ]
    text = "".join(f'{name}{{engine="{rank}",source="{source}"}} {count}.0\n' for rank, source, count in rows)
    assert parse_report(text).loaded_tokens == {"host": 72, "disk": 16}
    assert parse_report(text, 1).loaded_tokens == {"host": 8}
    assert parse_report(text, 2).loaded_tokens == {}
    assert parse_report(f'{name}{{source="host"}} -1\n{name}{{source="disk"}} 1e30\n{name} 4\n').loaded_tokens == {
        "disk": MAX_COUNT
    }

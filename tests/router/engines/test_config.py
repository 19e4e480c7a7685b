from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tandem.protocol.config import ExternalEnginesConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import Role
from tandem.router.engines.config import check_fleet, load_fleet, ranks_of, spec_from

GOOD = """
[tokenizers]
"org/model" = "/models/org"

[[engines]]
name = "p0"
url = "http://10.0.0.1:8000/v1/"
model = "org/model"
kind = "vllm"
role = "prefill"
group = "rack1"

[[engines]]
url = "http://10.0.0.2:8000"
model = "org/model"
kind = "vllm"
role = "decode"
group = "rack1"
api_key_env = "SOME_KEY"
block_size = 32
kv_events = "tcp://10.0.0.2:5557"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "engines.toml"
    path.write_text(text)
    return path


def test_a_file_becomes_specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "secret")
    fleet = load_fleet(write(tmp_path, GOOD))
    first, second = fleet.engines
    assert fleet.tokenizers == {"org/model": "/models/org"}
    assert (first.name, first.url, first.role, first.group) == ("p0", "http://10.0.0.1:8000", Role.PREFILL, "rack1")
    assert (second.name, second.role, second.block_size) == ("10.0.0.2-8000", Role.DECODE, 32)
    assert second.api_key() == "secret"
    assert "secret" not in repr(second)
    assert spec_from({"url": "http://h:1", "model": None, "headers": None}, "test").headers == {}  # as left out


def test_each_rank_of_a_server_is_an_engine_with_its_own_header_and_events(tmp_path: Path) -> None:
    entry = engine(url="http://h:1", name="a", kind="vllm", data_parallel_size=3, model="m", **EVENTS)
    fleet = load_fleet(write(tmp_path, '[tokenizers]\nm = "/m"\n' + entry))
    assert [(e.name, e.server, e.kv_events, e.kv_replay) for e in fleet.engines] == [
        (f"a.dp{rank}", "a", f"tcp://[::1]:{5557 + rank}", f"tcp://10.0.0.2:{6000 + rank}") for rank in range(3)
    ]
    assert [e.request_headers() for e in fleet.engines] == [{"x-data-parallel-rank": str(rank)} for rank in range(3)]
    assert {e.url for e in fleet.engines} == {"http://h:1"}
    [alone] = ranks_of(spec_from({"url": "http://h:1", "name": "a.dp1"}, "test"))
    assert (alone.server, alone.request_headers()) == ("a.dp1", {})


EVENTS = {"kv_events": "tcp://[::1]:5557", "kv_replay": "tcp://10.0.0.2:6000"}


def engine(**values: Any) -> str:
    lines = [f"{key} = {value!r}" if isinstance(value, str) else f"{key} = {value}" for key, value in values.items()]
    return "[[engines]]\n" + "\n".join(lines) + "\n"


URL = "http://h:1"


def ranked(**values: Any) -> str:
    return engine(url=URL, kind="vllm", data_parallel_size=2, **values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[engines]", "is not valid TOML"),
        ("[[workers]]\n", "unknown key 'workers'; known are [[engines]]"),
        ("engines = 3\n", "write [[engines]] above each"),
        ("[tokenizers]\na = 3\n", "[tokenizers] must map models"),
        (engine(name="a"), "engines[0]: url is missing; give the engine's address"),
        (engine(url="h:1"), "engines[0]: url='h:1' is not of the form"),
        (engine(url="http://h:1 /x"), "is not of the form"),
        (engine(url="http://me:sk-123@h:1"), "engines[0]: url has credentials in it; take out all up to '@'"),
        (engine(url="https://sk-123@h"), "name the variable that has the key in api_key_env"),
        (engine(url="http://h:99999"), "has no host and port that can be connected to"),
        (engine(url="http://h:eighty"), "has no host and port that can be connected to"),
        (engine(url="http://[::1"), "has no host and port that can be connected to"),
        (engine(url="http://[v1.a]:80"), "has no host and port that can be connected to"),
        ('[[engines]]\nurl = "http://a\\u0000:80"\n', "has no host and port that can be connected to"),
        (engine(url="http://:80"), "has no host and port that can be connected to"),
        (engine(url="http://b\u00fccher:80"), "has no host and port that can be connected to"),
        (engine(url=URL) + 'headers = {"a b" = "c"}\n', "headers: 'a b' cannot be sent"),
        (engine(url=URL) + 'headers = {x = "sk-123\\r\\ny: z"}\n', "headers: 'x' cannot be sent"),
        (engine(url=URL) + 'headers = {x = "\u20ac"}\n', "visible Latin characters in its value"),
        (engine(url=URL) + 'headers = {Transfer-Encoding = "chunked"}\n', "'Transfer-Encoding' is set by the router"),
        (engine(url=URL) + 'headers = {connection = "close"}\n', "'connection' is set by the router"),
        (engine(url=URL) + 'headers = {content-length = "1"}\n', "'content-length' is set by the router"),
        (engine(url=URL, rol="both"), "engines[0]: unknown key 'rol'; known are name, url"),
        (engine(url=URL, role="all"), "role='all' must be one of prefill, decode, both"),
        (engine(url=URL, role="decode"), "role='decode' needs kind='vllm'"),
        (engine(url=URL, kind="tgi"), "kind='tgi' must be one of openai, vllm"),
        (engine(url=URL, block_size="16"), "block_size='16' must be a whole number"),
        (engine(url=URL) + "block_size = true\n", "block_size=True must be a whole number"),
        (engine(url=URL, cache_ttl_s=0), "cache_ttl_s=0 must be a number"),
        (engine(url=URL, model=3), "model=3 must be text"),
        (engine(url=URL, cache_salt="no"), "cache_salt='no' must be true or false"),
        (engine(url=URL, name="a b"), "name='a b' must be letters"),
        (engine(url=URL, api_key_env="sk-123"), "put the key into one and name it here"),
        (engine(url=URL, api_key_env="NOT_SET_ANYWHERE"), "api_key_env='NOT_SET_ANYWHERE' is not set"),
        (engine(url=URL, kv_events="h:5557"), "kv_events='h:5557' must be a ZMQ endpoint"),
        (engine(url=URL, kv_replay="tcp://h:1"), "kv_replay without kv_events"),
        (engine(url=URL, model="m", kv_events="tcp://h:1"), "'tcp://h:1' need model, and its tokenizer"),
        (engine(url=URL, headers=3), "headers must be a table of strings"),
        (engine(url=URL) + 'headers = {x = "sk-123", y = 3}\n', "headers must be a table of strings"),
        (engine(url=URL, block_size=-1), "block_size=-1 must be a whole number, 0 or more"),
        (engine(url=URL) + "cache_ttl_s = nan\n", "cache_ttl_s=nan must be a number of seconds above 0"),
        (engine(url=URL, name="a") + engine(url="http://h:2", name="a"), "engine name='a' appears twice"),
        (engine(url=URL, data_parallel_size=0), "data_parallel_size=0 must be a whole number from 1 to 1024"),
        (engine(url=URL, data_parallel_rank=1), "unknown key 'data_parallel_rank'"),
        (engine(url=URL, data_parallel_size=2), "data_parallel_size=2 needs kind='vllm' or 'sglang'"),
        (ranked(kv_events="ipc:///tmp/x"), "kv_events='ipc:///tmp/x' is not the endpoint of rank 0 of data_parallel"),
        (ranked(kv_events="tcp://h:65535"), "give tcp://host:port, where rank N publishes on port + N"),
        (ranked(kv_events="tcp://h:10", kv_replay="tcp://h:11"), "start the server with ports that are 2 apart"),
        (ranked(name="a") + engine(url=URL, name="a"), "engine name='a' appears twice"),
        (engine(url=URL) + 'headers = {X-Data-Parallel-Rank = "1"}\n', "'X-Data-Parallel-Rank' is set by the router"),
    ],
)
def test_what_is_wrong_is_named_with_file_key_value_and_remedy(text: str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_fleet(path)
    assert expected in caught.value.message
    assert str(path) in caught.value.message or "api_key_env" in expected or "NOT_SET" in expected
    assert "sk-123" not in caught.value.message


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_fleet(tmp_path / "none.toml")


def test_prefill_engines_need_a_decode_engine_in_their_group() -> None:
    prefill = spec_from({"url": URL, "kind": "vllm", "role": "prefill", "group": "g"}, "test")
    elsewhere = spec_from({"url": "http://h:2", "kind": "vllm", "role": "decode"}, "test")
    with pytest.raises(ConfigError, match="only prefill engines in group 'g'"):
        check_fleet([prefill, elsewhere])
    check_fleet([prefill, spec_from({"url": "http://h:3", "group": "g"}, "test")])


@pytest.mark.parametrize(
    "values", [{"engine_stall_s": -1.0}, *({"probe_interval_s": value} for value in (-1.0, math.nan, math.inf))]
)
def test_limits_that_make_no_sense_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        ExternalEnginesConfig(**values)


def test_an_engine_that_is_printed_keeps_its_key_to_itself() -> None:
    spec = spec_from({"url": URL, "headers": {"authorization": "Bearer secret"}}, "test")
    assert "secret" not in f"{spec}{spec!r}"

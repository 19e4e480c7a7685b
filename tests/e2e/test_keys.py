"""API keys, tenants and traces of a real server with two router processes, and how it ends after SIGTERM."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from tests.support.collector import Collector, collecting
from tests.support.key_scenario import Asker, Keys, exercise_keys
from tests.support.keys import make_key_file
from tests.support.served_trace import ask as ask_traced
from tests.support.served_trace import authorization, check_trace, tracing_to
from tests.support.server import HTTP, Server, begun_stream, started, status_of
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

PROMPT = "The ferry leaves from the north pier at noon. " * 8
TENANTS = "[tenants.c]\nshared_cache = true\n[tenants.d]\nshared_cache = true\n"
TENANT_KEYS = {"sk-a": "a", "sk-b": "b", "sk-c": "c", "sk-d": "d", "sk-ops": "*"}


# A short queue of spans, so that a collector that hangs makes the server lose some.
SMALL_QUEUE = {"OTEL_BSP_MAX_QUEUE_SIZE": "16", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}


class Operated(NamedTuple):
    server: Server
    collector: Collector
    keys: Keys
    operator: str  # the key of an operator
    operator_id: str


@pytest.fixture(scope="module")
def operated(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    """The tests use it one after the other; the last one stops it."""
    folder = tmp_path_factory.mktemp("operated")
    tenants, keys = folder / "tenants.toml", Keys(folder / "keys.json", folder / "audit.jsonl")
    tenants.write_text(TENANTS)
    make_key_file(keys.path, TENANT_KEYS)
    operator, operator_id = keys.create("--operator")
    flags = ("--api-key-file", str(keys.path), "--audit-log", str(keys.audit_log), "--tenants", str(tenants))
    flags += ("--router-processes=2", "--tracing", "--routing=cost,pairs", "--pool-bytes=20000000", "--max-num-seqs=8")
    flags += ("--worker-timeout-s=60", "--shutdown-delay-s=6", "--drain-timeout-s=0.1")
    with (
        collecting() as collector,
        started(text_model, folder, *flags, env=tracing_to(collector) | SMALL_QUEUE) as server,
    ):
        server.wait_ready()
        check_trace(server, collector, operator)
        yield Operated(server, collector, keys, operator, operator_id)


def test_tenants_find_nothing_of_each_other(operated: Operated) -> None:
    def ask(method: str, path: str, key: str, body: Any = None) -> httpx.Response:
        return HTTP.request(method, operated.server.url + path, json=body, headers=authorization(key))

    def cached(key: str, **fields: Any) -> int:
        body = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True} | fields
        answer = ask("POST", "/v1/completions", key, body)
        assert answer.status_code == 200, answer.text
        return int((answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    assert cached("sk-a") == 0
    assert min(cached("sk-a") for _ in range(4)) >= 256
    assert [cached("sk-b"), cached("sk-b", cache_salt="a"), cached("sk-c")] == [0, 0, 0]
    assert cached("sk-d") >= 256
    pin = ask("POST", "/v1/cache/pin", "sk-a", {"prompt": PROMPT}).json()["id"]
    assert {ask("POST", "/v1/cache/unpin", "sk-b", {"id": pin}).status_code for _ in range(4)} == {404}
    shown = [ask("GET", "/v1/cache/pins", key).json()["data"] for key in ("sk-a", "sk-b", "sk-ops")]
    assert [[one["id"] for one in pins] for pins in shown] == [[pin], [], [pin]]
    decisions = ask("GET", "/v1/route/decisions", "sk-b").json()["data"]
    assert {decision["tenant"] for decision in decisions} == {"b"}
    assert 'tenant="' not in ask("GET", "/metrics", "sk-a").text
    assert 'tenant="c"' in ask("GET", "/metrics", "sk-ops").text


def test_a_short_answer_does_not_wait_for_all_the_room_that_another_tenant_holds(operated: Operated) -> None:
    """Nothing of the other tenant ends before: a worker takes a seat and blocks back from it."""
    url = operated.server.url

    def ask(key: str, **fields: Any) -> httpx.Response:
        return HTTP.post(f"{url}/v1/completions", json={"ignore_eos": True} | fields, headers=authorization(key))

    def pools() -> dict[str, Any]:
        report: dict[str, Any] = HTTP.get(f"{url}/v1/pools", headers=authorization(operated.operator)).json()
        return report

    def decoders(field: str) -> int:
        return sum(int(worker[field]) for worker in pools()["roles"]["decode"])

    num_before = decoders("num_preemptions")
    with ThreadPoolExecutor(4) as threads:
        # Two full batches, and long enough that the first one runs however fast the machine is.
        hoard = [threads.submit(ask, "sk-a", prompt=f"{idx} {PROMPT}", n=4, max_tokens=1600) for idx in range(4)]
        until(
            lambda: decoders("num_running") == 8,
            60.0,
            explain=lambda: f"{pools()}, ended {[one.result().text[:99] for one in hoard if one.done()]}",
        )
        answers = [ask("sk-b", prompt=f"{idx} short", max_tokens=4) for idx in range(3)]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert not any(one.done() for one in hoard), "the short answers waited for a long one"
        assert {one.result().status_code for one in hoard} == {200}
    assert decoders("num_preemptions") > num_before


def test_keys_are_made_limited_and_revoked_under_load(operated: Operated) -> None:
    server, _, keys, operator, operator_id = operated
    before = keys.audited()
    took_s = exercise_keys(server.url, keys, operator)
    print(f"a revoked key was last accepted after {took_s:.2f} s")
    an_openai_client_waits_as_told(server.url, keys)
    headers = authorization(operator)
    change = {"worker": "prefill-0", "role": "decode"}
    changed = HTTP.post(f"{server.url}/v1/pools/roles", json=change, headers=headers)
    pin = HTTP.post(f"{server.url}/v1/cache/pin", json={"prompt": "secret words " * 20}, headers=headers)
    assert pin.status_code == 200, pin.text
    result = "ok" if changed.status_code == 200 else changed.json()["error"]["code"]
    until(lambda: {("role.change", result), ("pin.create", "ok")} <= (keys.audited() - before).keys())
    audited = keys.audited() - before
    assert audited["role.change", result] == audited["pin.create", "ok"] == 1
    text = keys.audit_log.read_text()
    assert f'"key_id":"{operator_id}"' in text
    assert operator not in text
    assert "secret words" not in text
    assert operator not in server.output


def an_openai_client_waits_as_told(url: str, keys: Keys) -> None:
    """A key of 60 requests a minute: once they are used, the client's own retry comes a second later, and is served."""
    secret, key_id = keys.create("--requests-per-minute", "60")
    until(lambda: Asker(url).seen(secret) == {200})
    with openai.OpenAI(base_url=f"{url}/v1", api_key=secret, max_retries=0, timeout=60) as client:

        def complete(_: int) -> openai.types.Completion:
            return client.completions.create(model="tiny", prompt="a b c", max_tokens=1)

        with ThreadPoolExecutor(4) as pool, pytest.raises(openai.RateLimitError) as refused:
            list(pool.map(complete, range(200)))
        assert refused.value.code == "rate_limit_exceeded"
        assert f"The API key {key_id} has used up its limit requests_per_minute=60" in str(refused.value)
        patient = client.with_options(max_retries=5)
        served = patient.completions.create(model="tiny", prompt="a b c", max_tokens=1)
        assert served.choices[0].finish_reason == "length"  # the text may be empty: it is one drawn token


def test_a_collector_that_hangs_costs_spans_and_answers_end_in_peace_after_sigterm(operated: Operated) -> None:
    """A worker is stopped for longer than the five seconds that answers once had after the signal."""
    server, collector, operator = operated.server, operated.collector, operated.operator
    collector.is_open.clear()
    lost = 'tandem_router_dropped_spans_total{reason="queue_full"} '

    def num_lost() -> float:
        metrics = HTTP.get(f"{server.url}/metrics", headers=authorization(operator)).text
        (line,) = [line for line in metrics.splitlines() if line.startswith(lost)]
        return float(line.removeprefix(lost))

    num_lost_before = num_lost()

    def loses_spans() -> bool:
        """Ask once more: which of the router's processes answers, and when it exports, is not ours to say."""
        assert ask_traced(server, operator).status_code == 200
        return num_lost() > num_lost_before

    until(loses_spans, 60.0)
    until(lambda: collector.num_held > 0)
    worker = psutil.Process(server.worker("decode", authorization(operator))["pid"])
    body = {"prompt": "a b", "max_tokens": 1600, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    with begun_stream(server.url, body | streamed, authorization(operator)) as lines:
        worker.suspend()
        try:
            told_s = time.monotonic()
            children = server.children()
            server.process.send_signal(signal.SIGTERM)
            until(lambda: status_of(f"{server.url}/ready") == 503)
            until(lambda: status_of(f"{server.url}/health") == 0)
            assert time.monotonic() - told_s > 5.0
        finally:
            worker.resume()
        shown = [line for line in lines if line]
    assert shown[-1] == "data: [DONE]", server.output
    assert '"completion_tokens":1600' in shown[-2]
    assert server.wait_ended(children) == 0
    assert operator not in server.output

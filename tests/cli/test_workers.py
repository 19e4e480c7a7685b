"""`tandem drain` and `tandem restart` against a server that is a fake: what they ask for, wait for and say."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tandem.cli import workers
from tandem.cli.main import run

Json = dict[str, Any]


class FakeServer:
    """Workers that leave, and come back, after some looks at them."""

    def __init__(self, pools: Json) -> None:
        self.pools = pools
        self.asked: list[Json] = []
        self.refusals: list[httpx.Response] = []
        self.records: list[Json] = []
        self.comes_back = True
        self.num_looks = 0

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            assert request.url.path == "/v1/pools/drain"
            if self.refusals:
                return self.refusals.pop(0)
            body = json.loads(request.content)
            self.asked.append(body)
            self.num_looks = 0
            self.records.append({"id": len(self.records) + 1, "worker": body["worker"], "restart": body["restart"]})
            return httpx.Response(200, json=self.records[-1])
        assert request.url.path == "/v1/pools"
        self.num_looks += 1
        if self.records and self.num_looks > 1:
            self.records[-1] |= {"left_after_s": 1.25, "finished": True}
        if self.records and self.num_looks > 2 and self.comes_back:
            self.records[-1]["back_after_s"] = 9.5
        return httpx.Response(200, json=self.pools | {"autoscaler": {"departures": self.records}})


WORKERS = {"roles": {"prefill": [{"worker_id": "prefill-0"}], "decode": [{"worker_id": "decode-0"}], "colocated": []}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake, client = FakeServer(WORKERS), httpx.Client
    monkeypatch.setattr(workers, "_POLL_S", 0.001)
    transport = httpx.MockTransport(lambda request: fake.answer(request))
    monkeypatch.setattr(httpx, "Client", lambda **options: client(**options, transport=transport))
    return fake


def refusal(code: str, message: str, status: int = 409) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "code": code}})


def test_a_worker_is_drained(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drain", "decode-0", "--grace", "5"]) == 0
    assert server.asked == [{"worker": "decode-0", "grace_s": 5, "restart": False}]
    assert capsys.readouterr().err.strip() == "decode-0: left after 1.2 s"


def test_a_rolling_restart_waits_for_each_worker(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["restart", "--rolling"]) == 0
    assert [one["worker"] for one in server.asked] == ["prefill-0", "decode-0"]
    assert all("back_after_s" in record for record in server.records)
    assert "prefill-0: left after 1.2 s, back after 9.5 s" in capsys.readouterr().err


def test_ranks_of_one_server_are_one_worker(server: FakeServer) -> None:
    server.pools = {"engines": [{"name": "vllm-0.dp0"}, {"name": "vllm-0.dp1"}, {"name": "vllm-1"}]}
    assert run(["restart", "--rolling"]) == 0
    assert [one["worker"] for one in server.asked] == ["vllm-0", "vllm-1"]


def test_others_are_left_alone_when_one_does_not_come_back(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.comes_back = False
    now = iter(range(10**6))
    monkeypatch.setattr(workers.time, "monotonic", lambda: float(next(now)))
    assert run(["restart", "--rolling", "--timeout", "30"]) != 0
    assert [one["worker"] for one in server.asked] == ["prefill-0"]
    assert "prefill-0 did not come back within --grace 30 and --timeout 30 s" in capsys.readouterr().err


def test_a_worker_that_flips_is_asked_again(server: FakeServer) -> None:
    server.refusals = [refusal("drain_refused", "decode-0 is about to change its role")] * 3
    assert run(["restart", "decode-0"]) == 0
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("command", "refused", "message"),
    [
        (
            ["drain", "decode-0"],
            refusal("drain_refused", "Without decode-0 no worker could answer"),
            "Without decode-0",
        ),
        (
            ["drain", "x"],
            refusal("worker_not_found", "There is no worker 'x'", 404),
            "There is no worker 'x' (HTTP 404)",
        ),
        (["restart", "e"], refusal("not_managed", "The engines are not run by this router"), "not run by this router"),
        (["restart", "d"], refusal("forbidden", "not an operator's", 403), "not an operator's (HTTP 403)"),
    ],
)
def test_a_refusal_is_shown(
    server: FakeServer, capsys: pytest.CaptureFixture[str], command: list[str], refused: httpx.Response, message: str
) -> None:
    server.refusals = [refused]
    assert run(command) != 0
    assert message in capsys.readouterr().err
    assert not server.asked


@pytest.mark.parametrize("arguments", [[], ["decode-0", "--rolling"]])
def test_either_workers_or_all_of_them_are_restarted(
    server: FakeServer, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run(["restart", *arguments]) == 2
    assert "name the workers to restart, or give --rolling" in capsys.readouterr().err


def test_a_tenants_key_is_told_what_it_lacks(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server, "answer", lambda _: httpx.Response(200, json=WORKERS))
    assert run(["restart", "--rolling"]) != 0
    assert "give an operator's key with --api-key" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["serves", "withdrawn", "refused"])
def test_a_worker_is_added(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    looks = iter([{}, {"withdrawn": "no such model"} if end == "withdrawn" else {"serving_after_s": 7.25}])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/pools/add":
            assert json.loads(request.content) == {"role": "decode"}
            return refusal("add_refused", "no room") if end == "refused" else httpx.Response(200, json={"worker": "d2"})
        arrivals = [{"worker": "d2"} | next(looks)]
        return httpx.Response(200, json={"autoscaler": {"arrivals": arrivals, "departures": []}})

    monkeypatch.setattr(server, "answer", answer)
    assert (run(["add", "decode"]) == 0) == (end == "serves")
    told = {"serves": "d2: serves after 7.2 s", "withdrawn": "d2 was not added: no such model", "refused": "no room"}
    assert told[end] in capsys.readouterr().err

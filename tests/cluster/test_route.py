"""`tandem route --router-processes`: real processes on one port, in front of fake engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tandem.cli.main import run
from tests.support.fake_openai import FakeServer, fake_openai
from tests.support.key_scenario import Keys, exercise_keys
from tests.support.waiting import until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BODY: dict[str, Any] = {"prompt": "a b c", "max_tokens": 3, "stream": False}
ADMIN = {"authorization": "Bearer secret"}


@contextmanager
def fakes(count: int) -> Iterator[list[FakeServer]]:
    with fake_openai() as first:
        if count == 1:
            yield [first]
        else:
            with fakes(count - 1) as rest:
                yield [first, *rest]


class Running:
    """The command, its processes and a client that opens a connection for each request."""

    def __init__(self, process: subprocess.Popen[str], url: str, headers: dict[str, str]) -> None:
        self.process = process
        self.url = url
        self.headers = headers
        self.ever = set(self.children())

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, **({"headers": self.headers, "trust_env": False, "timeout": 20.0} | kwargs))

    def complete(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY | fields, trust_env=False, timeout=30.0)

    def pools(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("/v1/pools").json()
        return body

    def totals(self, name: str) -> float:
        lines = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def are_there(self, count: int) -> bool:
        """Whether the processes that answer know of `count` processes and see all engines ready."""
        pools = [self.pools() for _ in range(2 * count)]
        return all(
            len(one.get("processes", ["alone"])) == count
            and all(engine["state"] == "ready" for engine in one["engines"])
            for one in pools
        )

    def assert_idle(self) -> None:
        def is_idle() -> bool:
            pools = self.pools()
            return pools["num_requests"] == 0 and pools["queued_prompt_tokens"] == 0

        until(is_idle)

    def assert_gone(self) -> None:
        until(lambda: not any(map(psutil.pid_exists, self.ever)), explain=lambda: f"some of {self.ever} are left")


@contextmanager
def routing(
    tmp_path: Path,
    engines: list[FakeServer],
    count: int,
    *flags: str,
    headers: dict[str, str] | None = None,
    settings: str = "",
) -> Iterator[Running]:
    """The command with this number of processes; `headers` are those of requests that look at it.

    `settings` are lines of each engine's table.
    """
    path = tmp_path / "engines.toml"
    tables = [
        f'[[engines]]\nname = "e{i}"\nurl = "{fake.url}"\nkind = "vllm"\n{settings}\n' for i, fake in enumerate(engines)
    ]
    path.write_text("".join(tables))
    command = [
        sys.executable,
        "-m",
        "tandem",
        "route",
        f"--engines={path}",
        "--port=0",
        "--allow-local-engines",
        "--probe-interval-s=0.05",
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TANDEM_ADMIN_TOKEN": "secret"}
    process = subprocess.Popen(
        [*command, f"--router-processes={count}", *flags], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
    )
    watchdog = threading.Timer(90, process.kill)
    watchdog.start()
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        assert f"Routing to {len(engines)} engine(s) on http://" in line, line + process.stderr.read()
        assert (f"by {count} processes" in line) == (count > 1)
        running = Running(process, line.split()[5], headers or {})
        until(lambda: running.are_there(count))
        yield running
        running.ever |= set(running.children()) if process.poll() is None else set()
    finally:
        process.kill()
        process.wait()
        watchdog.cancel()
        process.stderr.close()
    running.assert_gone()


def burst(running: Running, num_requests: int, **fields: Any) -> Counter[str]:
    """Send requests at once, each on its own connection, and count the answers of each engine."""
    with ThreadPoolExecutor(num_requests) as pool:
        answers = list(pool.map(lambda _: running.complete(**fields), range(num_requests)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["choices"][0]["text"] for answer in answers} == {"word " * 3}
    return Counter(answer.headers["x-tandem-engine"] for answer in answers)


def test_keys_are_made_limited_and_revoked_under_load(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json", tmp_path / "audit.jsonl")
    operator, _ = keys.create("--operator")
    flags = (f"--api-key-file={keys.path}", f"--audit-log={keys.audit_log}")
    headers = {"authorization": f"Bearer {operator}"}
    with fakes(1) as engines, routing(tmp_path, engines, 2, *flags, headers=headers) as running:
        print(f"a revoked key was last accepted after {exercise_keys(running.url, keys, operator):.2f} s")
        assert running.get("/v1/engines", headers=ADMIN).status_code == 200
        drained = httpx.delete(f"{running.url}/v1/engines/e0", headers=ADMIN, timeout=20.0)
        assert drained.status_code == 202
        until(lambda: keys.audited()["engine.drain", "ok"] == 1)


def test_one_port_one_total_and_a_clean_end(tmp_path: Path) -> None:
    with fakes(2) as engines, routing(tmp_path, engines, 3) as running:
        assert len(running.ever) == 3
        placed = burst(running, 24)
        running.assert_idle()
        assert placed.total() == 24
        for _ in range(6):  # whichever process answers
            assert running.totals('tandem_router_requests_total{endpoint="/v1/completions",status="200"}') == 24
            assert running.totals("tandem_engine_requests_total") == 24
            assert running.totals("tandem_router_processes") == 3
            assert sum(engine["num_requests"] for engine in running.pools()["engines"]) == 24
        assert sum(len(fake.requests) for fake in engines) == 24
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        running.assert_gone()


def test_requests_of_all_processes_at_once_go_evenly_over_equal_engines(tmp_path: Path) -> None:
    num_requests = 48
    with fakes(4) as engines, routing(tmp_path, engines, 3) as running:
        for fake in engines:
            fake.headers_pause.clear()  # no engine answers before all requests are placed
        with ThreadPoolExecutor(num_requests) as pool:
            answers = [pool.submit(running.complete, prompt=f"{i} {'x' * 400}") for i in range(num_requests)]
            until(lambda: sum(len(fake.requests) for fake in engines) == num_requests)
            counts = sorted(len(fake.requests) for fake in engines)
            for fake in engines:
                fake.resume()
            assert all(answer.result().status_code == 200 for answer in answers)
        print("placed", counts)
        assert counts[0] >= 8
        assert counts[-1] <= 16
        running.assert_idle()


def test_a_process_that_dies_is_replaced_and_its_load_forgotten(tmp_path: Path) -> None:
    with fakes(2) as engines, routing(tmp_path, engines, 2) as running:
        burst(running, 8)
        before = running.totals("tandem_engine_requests_total")
        for fake in engines:
            fake.headers_pause.clear()
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(running.complete) for _ in range(12)]
            until(lambda: running.pools()["num_requests"] == 12)
            shares = {name: one["num_requests"] for name, one in running.pools()["processes"].items()}
            victim = running.children()[0]
            os.kill(victim, signal.SIGKILL)
            broken = [answer for answer in answers if _is_broken(answer)]
            assert len(broken) in shares.values()
            until(lambda: running.pools()["num_requests"] == 12 - len(broken))
            until(lambda: victim not in running.children() and len(running.children()) == 2)
            for fake in engines:
                fake.resume()
            assert sum(answer.exception() is None and answer.result().status_code == 200 for answer in answers) == (
                12 - len(broken)
            )
        until(lambda: running.are_there(2))
        running.ever |= set(running.children())
        running.assert_idle()
        assert running.totals("tandem_engine_requests_total") >= before
        burst(running, 8)


def test_a_process_that_takes_anothers_place_has_the_tenants_of_the_others(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.search]\nweight = 4.0\n")
    with fakes(1) as engines, routing(tmp_path, engines, 2, f"--tenants={tenants}") as running:
        tenants.write_text("[being edited")
        killed = running.children()[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: killed not in running.children())
        until(lambda: running.are_there(2))
        running.ever |= set(running.children())
        burst(running, 8)


def test_a_process_that_hangs_is_replaced(tmp_path: Path) -> None:
    with fakes(1) as engines, routing(tmp_path, engines, 2, "--worker-timeout-s=2") as running:
        hung = running.children()[0]
        os.kill(hung, signal.SIGSTOP)
        until(lambda: hung not in running.children() and len(running.children()) == 2)
        until(lambda: running.are_there(2))
        burst(running, 8)


def test_a_decider_that_hangs_ends_no_answer_that_has_begun_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with fakes(1) as [engine], routing(tmp_path, [engine], 2, "--worker-timeout-s=2") as running:
        engine.pause.clear()
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(running.complete, stream=True) for _ in range(4)]
            until(lambda: running.totals("tandem_engine_running_requests") == 4)
            until(lambda: engine.num_running == 4)
            os.kill(running.process.pid, signal.SIGSTOP)
            until(lambda: running.get("/ready").status_code == 503)
            assert running.complete().status_code == 503
            engine.resume()
            for stream in streams:
                answer = stream.result()
                assert (answer.status_code, answer.text.endswith("data: [DONE]\n\n")) == (200, True)
            os.kill(running.process.pid, signal.SIGCONT)
        until(lambda: all(running.get("/ready").status_code == 200 for _ in range(4)))
        assert set(running.children()) <= running.ever  # nobody was replaced
        running.assert_idle()
        burst(running, 8)


def _is_broken(answer: Any) -> bool:
    """Whether the request's connection breaks within a second. Requests at the other process still wait then."""
    try:
        answer.result(1.0)
    except httpx.TransportError:
        return True
    except TimeoutError:
        return False
    return False


def test_engines_added_and_removed_through_one_process_are_so_for_all(tmp_path: Path) -> None:
    with fakes(2) as engines, routing(tmp_path, engines[:1], 3) as running:
        added = httpx.post(
            f"{running.url}/v1/engines",
            json={"name": "late", "url": engines[1].url, "kind": "vllm"},
            headers=ADMIN,
            trust_env=False,
        )
        assert added.status_code == 201
        until(lambda: all(_names(running) == {"e0", "late"} for _ in range(6)))
        twice = httpx.post(
            f"{running.url}/v1/engines", json={"name": "late", "url": engines[1].url}, headers=ADMIN, trust_env=False
        )
        assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_engine")
        for name in ("e0", "late"):
            url = f"{running.url}/v1/engines/{name}"
            assert httpx.delete(url, headers=ADMIN, trust_env=False).status_code == 202
        until(lambda: all(_names(running) == set() for _ in range(6)))
        killed = running.children()[0]
        os.kill(killed, signal.SIGKILL)  # its successor reads the file, which still lists e0
        until(lambda: killed not in running.children())  # connections in its queue are lost
        until(lambda: running.are_there(3))
        running.ever |= set(running.children())
        assert all(_names(running) == set() for _ in range(12))


def _names(running: Running) -> set[str]:
    return {engine["name"] for engine in running.get("/v1/engines", headers=ADMIN).json()["data"]}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_lets_answers_end_and_a_second_one_does_not(tmp_path: Path, num_signals: int, count: int) -> None:
    with fakes(1) as [engine], routing(tmp_path, [engine], count, "--drain-timeout-s=20") as running:
        engine.headers_pause.clear()
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(running.complete) for _ in range(4)]
            until(lambda: len(engine.requests) == 4)
            for _ in range(num_signals):
                running.process.send_signal(signal.SIGINT)
                until(lambda: not _is_listening(running.url))
            if num_signals == 1:
                assert running.process.poll() is None
                engine.resume()
                assert [answer.result().status_code for answer in answers] == [200] * 4
            assert running.process.wait(10) == 0
            running.assert_gone()
            engine.resume()
            if num_signals == 2:
                assert not any(_is_whole(answer) for answer in answers)


def _is_whole(answer: Any) -> bool:
    """Whether a request was answered. Otherwise its connection broke, or the router answered that it ends."""
    return answer.exception() is None and answer.result().status_code == 200


def _is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", trust_env=False, timeout=5.0)
    except httpx.TransportError:
        return False
    return True


def test_nothing_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    with fakes(1) as engines, routing(tmp_path, engines, 2) as running:
        [folder] = {Path(path).parent for path in _socket_paths(running.process.pid)}
        running.process.kill()
        running.process.wait()
        running.assert_gone()
        until(lambda: not folder.exists())


def _socket_paths(pid: int) -> list[str]:
    return [
        str(connection.laddr)
        for connection in psutil.Process(pid).net_connections("unix")
        if "tandem-" in str(connection.laddr)
    ]


def test_what_a_child_cannot_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "e.toml"
    path.write_text('[tokenizers]\nm = "/no/such/model"\n[[engines]]\nurl = "http://h:1"\nmodel = "m"\n')
    assert run(["route", "--engines", str(path), "--port", "0", "--router-processes", "2"]) == 2
    captured = capsys.readouterr()
    assert "tokenizers: 'm' = '/no/such/model' cannot be loaded" in captured.err
    assert len(captured.err.splitlines()) == 1


def test_every_process_has_the_limits_and_knows_whom_to_listen_to(tmp_path: Path) -> None:
    with fakes(1) as engines, routing(tmp_path, engines, 2, "--max-body-bytes=1000") as running:
        for headers, fields, status in (
            ({"host": "page.example"}, {}, 403),
            ({"origin": "http://page.example"}, {}, 403),
            ({"content-type": "text/plain"}, {}, 415),
            ({"x" * 40_000: "y"}, {}, 431),
            ({}, {"prompt": "x" * 1000}, 413),
            ({}, {"kv_transfer_params": {"remote_host": "h"}}, 400),
            ({}, {}, 200),
        ):
            statuses = {
                httpx.post(
                    f"{running.url}/v1/completions", json=BODY | fields, headers=headers, trust_env=False
                ).status_code
                for _ in range(8)
            }
            assert statuses == {status}, headers
        assert len(engines[0].requests) == 8

import importlib
import json
import math
import re
import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from benchmarks import common
from benchmarks.common import Server, free_port, launched, measure_each, ratio, write_result
from tandem.loadtest.stats import Distribution

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if "arguments(__doc__" in path.read_text())

# A server that has a child of its own, and ends on SIGINT, or not, with or without that child.
SERVER = """
import http.server, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(child.pid).encode())
    def log_message(self, *args):
        pass
def stop(*_):
    child.kill()
    sys.exit(0)
signal.signal(signal.SIGINT, {"clean": stop, "orphan": lambda *_: sys.exit(0), "deaf": signal.SIG_IGN}[sys.argv[2]])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


@pytest.mark.parametrize("how", ["clean", "orphan", "deaf"])
def test_nothing_a_server_started_is_left(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_STOP_TIMEOUT_S", 0.5 if how == "deaf" else 10.0)
    monkeypatch.setattr(common, "_CHILDREN_TIMEOUT_S", 5.0 if how == "clean" else 0.1)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), how]
    with launched(command, ready=f"http://127.0.0.1:{port}") as running:
        started = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
        assert len(started) == 2
        assert running.start_s > 0
    assert [process for process in started if process.is_running()] == []


def test_a_server_that_ends_early_is_reported_with_its_log(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"]
    with pytest.raises(RuntimeError, match="code 3 before it was ready"), launched(command, ready="http://127.0.0.1:9"):
        pass
    assert "no such flag" in capsys.readouterr().out


def test_a_result_says_what_it_takes_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/exposure.py", "--seed", "3"])
    path = write_result("exposure", Namespace(seed=3), {512: {"share": math.nan, "rows": [(1, 0.5)]}})
    report = json.loads(path.read_text())
    assert path == tmp_path / "bench-results" / "exposure.json"
    assert report["command"] == "python -m benchmarks.exposure --seed 3"
    assert report["settings"] == {"seed": 3}
    assert report["results"] == {"512": {"share": None, "rows": [[1, 0.5]]}}
    assert {"date", "commit", "machine", "version"} <= report.keys()


def test_a_ratio_to_nothing_is_not_a_number() -> None:
    assert ratio(3.0, 2.0) == 1.5
    assert math.isnan(ratio(3.0, 0.0))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_help_and_a_make_target(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        module.main()
    told = capsys.readouterr().out
    assert "--quick" in told
    assert f"python -m benchmarks.{name}" in told, "its docstring says how to run it"
    targets = re.search(r"BENCHMARKS := (.*?)\n\n", (ROOT / "Makefile").read_text(), re.DOTALL)
    assert targets is not None
    assert name.replace("_", "-") in targets[1].replace("\\", " ").split()


def test_a_server_that_fails_does_not_take_the_others_results(capsys: pytest.CaptureFixture[str]) -> None:
    async def measure(server: Server) -> str:
        if server.name == "b":
            raise RuntimeError("b: no tokens")
        return server.url

    servers = [nullcontext(Server(name, f"http://{name}", "m", 1.0)) for name in "abc"]
    assert measure_each(servers, measure) == {"a": "http://a", "c": "http://c"}
    assert "left out: b: no tokens" in capsys.readouterr().out


def test_results_are_rows_with_their_names_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    times = Distribution.of([0.001, 0.003])
    common.print_results(
        "Waits", {"a": common.in_ms("wait", times, "p50", "max"), "b": {"wait p50": math.nan, "wait max": 0}}
    )
    told = capsys.readouterr().out
    assert re.search(r"wait p50 . wait max", told)
    assert re.search(r"a . +2 . +3 ", told)
    assert re.search(r"b . +- . +0 ", told)
    common.print_results("All servers were left out", {})


@pytest.mark.parametrize(("words", "expected"), [([], (5, [1, 8])), (["--quick"], (1, [1, 8]))])
def test_a_quick_run_has_values_of_its_own(
    words: list[str], expected: tuple[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["a", *words])
    parser = common.arguments(None, model=False)
    parser.option("--rounds", 5, quick=1)
    parser.option("--streams", [1, 8])
    settings = parser.settings()
    assert (settings.rounds, settings.streams) == expected

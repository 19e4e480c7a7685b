import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.fake_openai import FakeServer
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def test_headless_run_reports_ttft_and_itl(server: FakeServer) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--only-summary"]
    options = ["-u", "2", "-r", "2", "--host", server.url]
    with subprocess.Popen(
        [*command, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        try:
            until(lambda: any(len(body["messages"]) > 1 for body in server.requests) or run.poll() is not None)
            run.send_signal(signal.SIGTERM)  # a conversation has gone beyond its first turn
            shown, errors = run.communicate(timeout=60)
        finally:
            run.kill()
    assert run.returncode == 0, errors
    entries = {entry["name"]: entry for entry in json.loads(shown)}
    assert {"ttft", "itl", "conversation"} <= entries.keys()
    assert entries["itl"]["num_requests"] > entries["ttft"]["num_requests"] > 0
    assert all(entry["num_failures"] == 0 for entry in entries.values())

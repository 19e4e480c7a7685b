import json
import subprocess
import sys
from pathlib import Path

from tests.support.fake_openai import FakeServer

ROOT = Path(__file__).resolve().parents[2]


def test_headless_run_reports_ttft_and_itl(server: FakeServer) -> None:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--only-summary"]
    options = ["-u", "2", "-r", "2", "-t", "2s", "--host", server.url]
    finished = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    entries = {entry["name"]: entry for entry in json.loads(finished.stdout)}
    assert {"ttft", "itl", "conversation"} <= entries.keys()
    assert entries["itl"]["num_requests"] > entries["ttft"]["num_requests"] > 0
    assert all(entry["num_failures"] == 0 for entry in entries.values())
    assert max(len(body["messages"]) for body in server.requests) > 1, "conversations go beyond their first turn"

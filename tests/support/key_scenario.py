"""What an operator does with API keys while a real server of two processes runs, and what its clients see."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).parents[2]
BODY = {"prompt": "a b c", "max_tokens": 3}
NUM_LOOKS = 24  # connections that reach both of two processes: 2 ** -23 that they do not
TAKES_EFFECT_S = 20.0  # a deadline, many times what a quiet machine needs
LIMIT = 6


class Keys:
    """`tandem keys`, as a user types it."""

    def __init__(self, path: Path, audit_log: Path) -> None:
        self.path = path
        self.audit_log = audit_log

    def type_in(self, *words: str) -> str:
        command = [sys.executable, "-m", "tandem", "keys", *words, "--file", str(self.path)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def create(self, *words: str) -> tuple[str, str]:
        """The new key, and its id."""
        secret = self.type_in("create", "--audit-log", str(self.audit_log), *words)
        return secret, json.loads(self.type_in("list", "--json"))[-1]["id"]

    def revoke(self, key_id: str) -> None:
        self.type_in("revoke", key_id, "--audit-log", str(self.audit_log))

    def audited(self) -> Counter[tuple[str, str]]:
        lines = [json.loads(line) for line in self.audit_log.read_text().splitlines()]
        return Counter((line["action"], line["result"]) for line in lines)


def exercise_keys(url: str, keys: Keys, operator: str) -> float:
    """Create, use, limit and revoke keys under load.

    Returns the seconds between the change of the file by `tandem keys revoke` and the last accepted request.
    `operator` is an operator's key of the running server.
    """

    def ask(secret: str, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """On a connection of its own, so that any process may get it."""
        headers = {"authorization": f"Bearer {secret}"}
        return httpx.post(f"{url}{path}", json=BODY | fields, headers=headers, timeout=60, trust_env=False)

    def seen(secret: str) -> set[int]:
        headers = {"authorization": f"Bearer {secret}"}
        get = lambda _: httpx.get(f"{url}/v1/models", headers=headers, timeout=60, trust_env=False)  # noqa: E731
        return {get(number).status_code for number in range(NUM_LOOKS)}

    assert seen("sk-unknown") == {401}
    ours, our_id = keys.create("--name", "ours", "--tenant", "a")
    theirs, _ = keys.create("--tenant", "b")
    limited, limited_id = keys.create("--tenant", "b", "--requests-per-minute", str(LIMIT))
    brief, _ = keys.create("--expires", "3s")
    _until(lambda: seen(limited) == {200}, "the new keys are not known")

    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(limited), range(10 * LIMIT)))
    num_refilled = (time.monotonic() - began_s) * LIMIT / 60
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert LIMIT <= statuses[200] <= LIMIT + num_refilled
    refused = next(answer for answer in answers if answer.status_code == 429)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert f"{limited_id} has used up its limit requests_per_minute={LIMIT}" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60 / LIMIT
    _until(lambda: seen(brief) == {401}, "an expired key is still accepted")

    is_revoked = threading.Event()

    def load(secret: str) -> tuple[list[int], list[int], float]:
        """Statuses before and after it was seen that the key is refused; when the last accepted request was sent."""
        before: list[int] = []
        after: list[int] = []
        accepted_s = 0.0
        while len(after) < 10:
            statuses, sent_s = after if is_revoked.is_set() else before, time.time()
            statuses.append(ask(secret, stream=True).status_code)
            accepted_s = sent_s if statuses[-1] == 200 else accepted_s
        return before, after, accepted_s

    with ThreadPoolExecutor(4) as pool:
        loads = {secret: [pool.submit(load, secret) for _ in range(2)] for secret in (ours, theirs)}
        try:
            keys.revoke(our_id)
            revoked_s = keys.path.stat().st_mtime
            _until(lambda: seen(ours) == {401}, "a revoked key is still accepted")
        finally:
            is_revoked.set()
        last_accepted_s = revoked_s
        for secret, running in loads.items():
            for before, after, accepted_s in (one.result(timeout=120) for one in running):
                assert (before[0], set(after)) == (200, {401} if secret == ours else {200})
                last_accepted_s = max(last_accepted_s, accepted_s * (secret == ours))

    metrics = httpx.get(
        f"{url}/metrics", headers={"authorization": f"Bearer {operator}"}, timeout=60, trust_env=False
    ).text
    assert f'tandem_router_refused_keys_total{{key_id="{our_id}",reason="revoked"}}' in metrics
    assert f'tandem_router_refused_keys_total{{key_id="{limited_id}",reason="rate_limit"}}' in metrics
    assert "tandem_api_key_file_damaged 0.0" in metrics
    open_to_all = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).text
    assert our_id not in open_to_all
    _until(lambda: keys.audited()["keys.reload", "ok"] > 0, "no reload is in the audit log")
    assert keys.audited()["key.create", "ok"] == 4
    assert keys.audited()["key.revoke", "ok"] == 1
    for secret in (ours, theirs, limited, brief):
        assert secret not in keys.audit_log.read_text()
    return last_accepted_s - revoked_s


def _until(condition: Callable[[], bool], complaint: str) -> None:
    deadline_s = time.monotonic() + TAKES_EFFECT_S
    while not condition():
        assert time.monotonic() < deadline_s, complaint

"""What an operator does with API keys while a real server of two processes runs, and what its clients see."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tandem.frontend.keys.api_key import key_digest
from tandem.frontend.keys.store import read_keys
from tests.support.server import HTTP
from tests.support.waiting import until

REPOSITORY = Path(__file__).parents[2]
BODY = {"prompt": "a b c", "max_tokens": 3}
NUM_LOOKS = 24  # connections that reach both of two processes: 2 ** -23 that they do not
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
        return secret, next(key.id for key in read_keys(str(self.path)).keys if key.sha256 == key_digest(secret))

    def revoke(self, key_id: str) -> None:
        self.type_in("revoke", key_id, "--audit-log", str(self.audit_log))

    def audited(self) -> Counter[tuple[str, str]]:
        lines = [json.loads(line) for line in self.audit_log.read_text().splitlines()]
        return Counter((line["action"], line["result"]) for line in lines)


class Asker:
    """A client of a server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, secret: str = "") -> httpx.Response:
        return HTTP.get(self._url + path, headers={"authorization": f"Bearer {secret}"} if secret else {})

    def complete(self, secret: str, **fields: Any) -> httpx.Response:
        return HTTP.post(
            f"{self._url}/v1/completions", json=BODY | fields, headers={"authorization": f"Bearer {secret}"}
        )

    def seen(self, secret: str) -> set[int]:
        """What the processes answer to a key."""
        return {self.get("/v1/models", secret).status_code for _ in range(NUM_LOOKS)}


def exercise_keys(url: str, keys: Keys, operator: str) -> float:
    """Create, use, limit and revoke keys under load.

    Returns the seconds between the change of the file by `tandem keys revoke` and the last accepted request.
    `operator` is an operator's key of the running server.
    """
    asker = Asker(url)
    before = keys.audited()
    assert asker.seen("sk-unknown") == {401}
    ours, our_id = keys.create("--name", "ours", "--tenant", "a")
    theirs, _ = keys.create("--tenant", "b")
    limited, limited_id = keys.create("--tenant", "b", "--requests-per-minute", str(LIMIT))
    brief, _ = keys.create("--expires", "3s")
    until(lambda: asker.seen(limited) == {200})
    use_up(asker, limited, limited_id)
    until(lambda: asker.seen(brief) == {401})
    took_s = revoke_under_load(asker, keys, (ours, our_id), theirs)
    check_metrics(asker, operator, our_id, limited_id)
    until(lambda: (keys.audited() - before)["keys.reload", "ok"] > 0)
    audited = keys.audited() - before
    assert (audited["key.create", "ok"], audited["key.revoke", "ok"]) == (4, 1)
    for secret in (ours, theirs, limited, brief):
        assert secret not in keys.audit_log.read_text()
    return took_s


def use_up(asker: Asker, limited: str, limited_id: str) -> None:
    """A limit holds for all processes together."""
    began_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: asker.complete(limited), range(10 * LIMIT)))
    num_refilled = (time.monotonic() - began_s) * LIMIT / 60
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}
    assert LIMIT <= statuses[200] <= LIMIT + num_refilled
    refused = next(answer for answer in answers if answer.status_code == 429)
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert f"{limited_id} has used up its limit requests_per_minute={LIMIT}" in error["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 60 / LIMIT


def revoke_under_load(asker: Asker, keys: Keys, revoked: tuple[str, str], kept: str) -> float:
    """Revoke one of two keys in use. Returns the seconds until the last request with it was accepted."""
    secret, key_id = revoked
    is_revoked = threading.Event()

    def load(secret: str) -> tuple[list[int], list[int], float]:
        """Statuses before and after it was seen that the key is refused; when the last accepted request was sent."""
        before: list[int] = []
        after: list[int] = []
        accepted_s = 0.0
        while len(after) < 10:
            statuses, sent_s = after if is_revoked.is_set() else before, time.time()
            statuses.append(asker.complete(secret, stream=True).status_code)
            accepted_s = sent_s if statuses[-1] == 200 else accepted_s
        return before, after, accepted_s

    with ThreadPoolExecutor(4) as pool:
        with_revoked = [pool.submit(load, secret) for _ in range(2)]
        with_kept = [pool.submit(load, kept) for _ in range(2)]
        try:
            keys.revoke(key_id)
            revoked_s = keys.path.stat().st_mtime
            until(lambda: asker.seen(secret) == {401})
        finally:
            is_revoked.set()
        last_accepted_s(with_kept, 200)
        return max(revoked_s, last_accepted_s(with_revoked, 401)) - revoked_s


def last_accepted_s(loads: Iterable[Future[tuple[list[int], list[int], float]]], status: int) -> float:
    """Check that all ended with this status. Returns when the last accepted request was sent (Unix time)."""
    results = [load.result(timeout=120) for load in loads]
    assert all((before[0], set(after)) == (200, {status}) for before, after, _ in results), results
    return max(accepted_s for *_, accepted_s in results)


def check_metrics(asker: Asker, operator: str, revoked_id: str, limited_id: str) -> None:
    """Operators see which keys were refused; nobody else does."""
    metrics = asker.get("/metrics", operator).text
    assert f'tandem_router_refused_keys_total{{key_id="{revoked_id}",reason="revoked"}}' in metrics
    assert f'tandem_router_refused_keys_total{{key_id="{limited_id}",reason="rate_limit"}}' in metrics
    assert "tandem_api_key_file_damaged 0.0" in metrics
    assert revoked_id not in asker.get("/metrics").text

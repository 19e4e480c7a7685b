from __future__ import annotations

import pytest

from tandem.router import move_log
from tandem.router.move_log import MAX_REASONS, MoveLog
from tests.support.waiting import eventually


async def test_moves_of_a_reason_are_a_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(move_log, "GATHER_S", 0.01)
    log = MoveLog()
    for _ in range(300):
        log.add("worker_lost", "worker decode-0 died")
    log.add("worker_lost", "worker decode-1 is silent")
    assert caplog.messages == []
    await eventually(lambda: caplog.messages)
    assert caplog.messages == [
        "300 requests go on elsewhere: worker decode-0 died",
        "1 request goes on elsewhere: worker decode-1 is silent",
    ]
    caplog.clear()
    log.add("worker_lost", "worker decode-0 died")  # the next event has a line of its own
    await eventually(lambda: caplog.messages)
    assert caplog.messages == ["1 request goes on elsewhere: worker decode-0 died"]


async def test_reasons_of_their_own_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = MoveLog()
    for number in range(100):
        log.add("transfer_failed", f"block {number} did not come")
    log.tell()
    assert len(caplog.messages) == MAX_REASONS + 1
    assert caplog.messages[-1] == f"{100 - MAX_REASONS} requests go on elsewhere for {100 - MAX_REASONS} other reasons"
    log.tell()
    assert len(caplog.messages) == MAX_REASONS + 1

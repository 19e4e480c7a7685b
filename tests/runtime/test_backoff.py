from __future__ import annotations

from tandem.runtime.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 5.0)
    assert [backoff.pause_s(num) for num in range(6)] == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0]
    assert backoff.pause_s(10**6) == 5.0

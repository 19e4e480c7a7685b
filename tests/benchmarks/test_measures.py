"""The pure parts of the benchmarks: what they count, and what they call right."""

from typing import Any

import pytest

from benchmarks.cancel import _outcome
from benchmarks.equality import Answer
from benchmarks.exposure import exposed_s
from benchmarks.interference import gaps_within
from benchmarks.role_flip import LoadPhase, phase_at
from benchmarks.throughput import _keep_better
from tandem.loadtest.client import CUT, StreamTiming


def stream(*times_s: float, text: str = "", error: str = "") -> StreamTiming:
    return StreamTiming(0.0, event_times_s=list(times_s), num_output_tokens=len(times_s), text=text, error=error)


def test_only_gaps_that_end_in_the_phase_count() -> None:
    streams = [stream(1.0, 2.0, 3.5, 5.0), stream(2.9, 3.0)]
    assert gaps_within(streams, 2.0, 5.0) == pytest.approx([1.0, 1.5, 0.1])


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [((1.0, 1.5, 1.7, 1.9), 0.3), ((1.0, 1.1, 1.3, 1.5), 0.0)],
    ids=["second token late", "second token early"],
)
def test_exposed_is_the_first_gap_less_one_decode_step(times_s: tuple[float, ...], expected: float) -> None:
    assert exposed_s(stream(*times_s)) == pytest.approx(expected)


def test_a_phase_lasts_until_the_next_begins() -> None:
    plan = [LoadPhase("a", 0.0, 1, 1), LoadPhase("b", 10.0, 1, 1)]
    assert [phase_at(plan, time_s).name for time_s in (0.0, 9.9, 10.0, 99.0)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("timing", "is_to_be_cut", "expected"),
    [
        (stream(1.0, 2.0, text="ab"), False, "right"),
        (stream(1.0, 2.0, text="ac"), False, "wrong"),
        (stream(1.0, text="ab"), False, "wrong"),
        (stream(1.0, 2.0, text="ab"), True, "done_before_cut"),
        (stream(error=CUT), True, "cut_before_first_token"),
        (stream(1.0, text="a", error=CUT), True, "cut_in_answer"),
        (stream(1.0, text="b", error=CUT), True, "wrong"),
        (stream(1.0, text="a", error="connection lost"), False, "failed"),
    ],
)
def test_a_stream_is_right_only_if_all_that_came_is(timing: StreamTiming, is_to_be_cut: bool, expected: str) -> None:
    assert _outcome(timing, stream(1.0, 2.0, text="ab"), is_to_be_cut=is_to_be_cut) == expected


def test_answers_are_equal_to_the_last_token() -> None:
    reference = Answer("ab", 2, 0, ("a", "b"))
    assert Answer("ab", 2, 16, ("a", "b")).equals(reference), "a prefix hit does not matter"
    assert Answer("ab", 2, 0, None).equals(reference)
    assert not Answer("ab", 2, 0, ("ab", "")).equals(reference)
    assert not Answer("ab", 3, 0, None).equals(reference)


def test_the_best_of_several_rounds_counts() -> None:
    results: dict[str, dict[str, Any]] = {}
    for start_s, prefill, output in ((9.0, 100.0, 30.0), (8.0, 90.0, 40.0)):
        loads = {8: {"output_tokens_per_s": output}}
        _keep_better(results, "x", {"start_s": start_s, "prefill_tokens_per_s": prefill, "loads": loads})
    assert results["x"] == {
        "start_s": 8.0,
        "prefill_tokens_per_s": 100.0,
        "loads": {8: {"output_tokens_per_s": 40.0}},
    }

"""The pure parts of the benchmarks: what they count, and what they call right."""

import pytest

from benchmarks.equality import Answer
from benchmarks.exposure import exposed_s
from benchmarks.interference import gaps_within
from tandem.loadtest.client import StreamTiming


def stream(*times_s: float) -> StreamTiming:
    return StreamTiming(0.0, event_times_s=list(times_s), num_output_tokens=len(times_s))


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


def test_answers_are_equal_to_the_last_token() -> None:
    reference = Answer("ab", 2, 0, ("a", "b"))
    assert Answer("ab", 2, 16, ("a", "b")).equals(reference), "a prefix hit does not matter"
    assert Answer("ab", 2, 0, None).equals(reference)
    assert not Answer("ab", 2, 0, ("ab", "")).equals(reference)
    assert not Answer("ab", 3, 0, None).equals(reference)

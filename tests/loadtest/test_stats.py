import json
import math

import pytest

from tandem.loadtest.client import StreamTiming
from tandem.loadtest.stats import Distribution, summarize


def test_no_values_give_nan_and_null_in_json() -> None:
    assert math.isnan(Distribution.of([]).p50)
    summary = summarize([StreamTiming(0.0, error="gone")], concurrency=1, duration_s=2.0)
    plain = json.loads(json.dumps(summary.as_dict(), allow_nan=False))
    assert plain["ttft_s"]["p50"] is None
    assert (plain["num_requests"], plain["num_errors"], plain["first_error"]) == (1, 1, "gone")


def test_summary_leaves_failed_streams_out_of_the_figures() -> None:
    good = StreamTiming(10.0, event_times_s=[11.0, 11.5, 13.0], event_tokens=[1, 1, 1], num_output_tokens=3)
    bad = StreamTiming(10.0, event_times_s=[90.0], event_tokens=[1], num_output_tokens=1, error="broken")
    summary = summarize([good, bad], concurrency=2, duration_s=3.0)
    assert summary.output_tokens_per_s == 1.0
    assert summary.requests_per_s == pytest.approx(1 / 3)
    assert summary.ttft_s == Distribution(1, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert (summary.itl_s.count, summary.itl_s.p50, summary.itl_s.max) == (2, 1.0, 1.5)
    assert summary.tpot_s.mean == 1.0

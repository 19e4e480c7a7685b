"""Places of workers, as users read of them."""

from __future__ import annotations

import pytest

from tandem.cluster.placement import Bundle


@pytest.mark.parametrize(
    ("num_cpus", "num_gpus", "expected"),
    [
        (1.0, 0.0, "1 core"),
        (2.0, 0.0, "2 cores"),
        (1.0, 1.0, "1 core and 1 GPU"),
        (0.66667, 2.0, "0.667 cores and 2 GPUs"),
        (0.0, 0.0, "a place"),
    ],
)
def test_what_a_worker_needs_is_told_in_words(num_cpus: float, num_gpus: float, expected: str) -> None:
    assert str(Bundle(num_cpus, num_gpus, None)) == expected

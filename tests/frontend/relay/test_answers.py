from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.frontend.relay.answers import as_count


@pytest.mark.parametrize("value", [7, None, True, False, "5", 2.5, math.nan, -1, 0, 1 << 31, 1 << 70, [], {}])
def test_what_is_not_a_count_of_tokens_counts_as_none(value: Any) -> None:
    """A hub decodes counts strictly: one that it refuses would cost all notes of its message."""
    count = as_count(value)
    assert (count, type(count)) == (7 if value == 7 else 0, int)

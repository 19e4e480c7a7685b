from __future__ import annotations

from typing import Any

import pytest

from tandem.kv_transfer.handshake import compatibility_fields, differences, differing_fields


def make_fields(**changes: Any) -> dict[str, str]:
    fields: dict[str, Any] = {
        "model_revision": "m@1",
        "namespace": b"\x01\x02",
        "kv_dtype": "bfloat16",
        "block_size": 16,
        "block_shape": (3, 30, 2, 16, 64),
        "transport": "nixl",
        "checksums": "all",
    }
    return compatibility_fields(**{**fields, **changes})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kv_dtype": "float32"}, "kv_dtype: 'bfloat16' here, 'float32' there"),
        (
            {"kv_dtype": "torch.float8_e4m3fn of torch.bfloat16"},
            "kv_dtype: 'bfloat16' here, 'torch.float8_e4m3fn of torch.bfloat16' there",
        ),
        ({"block_size": 32}, "block_size: '16' here, '32' there"),
        ({"block_shape": (3, 30, 2, 16, 32)}, "block_shape: '3x30x2x16x64' here, '3x30x2x16x32' there"),
        ({"namespace": b"\x03"}, "namespace: '0102' here, '03' there"),
        ({"checksums": "off"}, "checksums: 'all' here, 'off' there"),
        (
            {"model_revision": "m@2", "transport": "in_process"},
            "model_revision: 'm@1' here, 'm@2' there; transport: 'nixl' here, 'in_process' there",
        ),
    ],
)
def test_each_difference_is_named_with_both_values(change: dict[str, Any], expected: str) -> None:
    assert differences(make_fields(), make_fields(**change)) == expected
    assert differing_fields(make_fields(), make_fields(**change)) == ", ".join(sorted(change))


def test_a_field_that_one_side_lacks_differs() -> None:
    theirs = make_fields()
    del theirs["block_size"]
    assert differences(make_fields(), theirs) == "block_size: '16' here, missing there"
    assert differences(theirs, make_fields()) == "block_size: missing here, '16' there"

"""Bytes of TLS are cut into records, however they arrive."""

from __future__ import annotations

import random

import pytest

from tandem.frontend.http.tls_records import TlsRecords


def record(num_bytes: int, kind: int = 23) -> bytes:
    return bytes([kind, 3, 3]) + num_bytes.to_bytes(2, "big") + random.Random(num_bytes).randbytes(num_bytes)


def taken(records: TlsRecords) -> list[bytes]:
    found = []
    while one := records.take():
        found.append(one)
    return found


@pytest.mark.parametrize("piece_bytes", [1, 4, 5, 6, 100_000])
def test_records_come_whole_and_in_order(piece_bytes: int) -> None:
    sent = [record(size, kind) for size, kind in [(1, 22), (0, 23), (16_384 + 256, 23), (22, 23), (2, 21)]]
    records, found, stream = TlsRecords(), [], b"".join(sent)
    for start in range(0, len(stream), piece_bytes):
        records.add(stream[start : start + piece_bytes])
        found += taken(records)
    assert found == sent
    assert len(records) == 0


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1", b"\x80\x2e\x01\x00\x02", b"\x16\x02\x00\x00\x01a", b"\x17\x03\x03\xff\xff"]
)
def test_what_is_no_tls_is_not_waited_for(garbage: bytes) -> None:
    records = TlsRecords()
    records.add(record(7) + garbage)
    assert taken(records) == [record(7), garbage]

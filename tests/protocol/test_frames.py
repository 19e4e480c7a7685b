"""Messages in a stream arrive whole, however the stream is cut."""

from __future__ import annotations

import asyncio
import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.frames import Frames, FrameTooLong, framed, next_frame, read_frame


@given(messages=st.lists(st.binary(max_size=20)), cuts=st.lists(st.integers(0, 100)))
def test_messages_arrive_whole_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(framed, messages))
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    frames = Frames()
    parts = [data[begin:end] for begin, end in itertools.pairwise(places)]
    assert [message for part in parts for message in frames.add(part)] == messages


def test_a_message_that_is_too_long_is_refused_when_it_is_announced() -> None:
    frames = Frames(max_bytes=3)
    assert frames.add(framed(b"abc")) == [b"abc"]
    for _ in range(2):
        with pytest.raises(FrameTooLong, match="a message of 4 bytes was announced"):
            frames.add(framed(b"abcd")[:4])


def test_a_blocking_reader_sees_the_end() -> None:
    stream = io.BytesIO(framed(b"one") + framed(b"") + b"\x01")
    assert [read_frame(stream) for _ in range(3)] == [b"one", b"", None]


async def test_a_reader_that_waits_sees_the_end() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(framed(b"one"))
    stream.feed_eof()
    assert await next_frame(stream) == b"one"
    with pytest.raises(asyncio.IncompleteReadError):
        await next_frame(stream)

from __future__ import annotations

from typing import Any, cast

import pytest

from tandem.router.engines.relay.sse import ChunkEvents
from tandem.router.engines.relay.stream_relay import StreamRelay
from tandem.router.engines.relay.upstream import Reply


class Counting:
    """An observer that counts tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def saw_tokens(self, count: int) -> None:
        self.num_tokens += count

    def saw_usage(self, usage: dict[str, Any], *, is_total: bool) -> None:
        pass

    def held(self, *, is_held: bool) -> None:
        pass

    def ended(self) -> None:
        pass


@pytest.mark.parametrize(
    "piece",
    [
        b'data: {"choices":[{"text":" end","logprobs":{"token_logprobs":[-Infinity]}}]}\n\n',
        b'data: {"choices":[{"text":"\\ud83d"}]}\n\n',
        b'data: {"choices":[{"text":"\xff"}]}\n\n',
    ],
)
def test_pieces_that_are_not_strict_json_are_passed_on_in_any_company(piece: bytes) -> None:
    ping, done = b": ping\n\n", b"data: [DONE]\n\n"
    for events, shown in ((piece, piece), (piece + done, piece + done), (ping + piece, piece), (piece + ping, piece)):
        observer = Counting()
        relay = StreamRelay("a", Reply(cast(Any, None)), observer, ChunkEvents(), shows_usage=False)
        assert (relay.visible(events), observer.num_tokens) == (shown, 1)


def role(index: int) -> bytes:
    delta = b'{"role":"assistant","content":""}'
    return b'data: {"choices":[{"index":%d,"delta":%b,"finish_reason":null}]}\n\n' % (index, delta)


def test_events_that_only_open_an_answer_are_no_tokens() -> None:
    piece = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
    with_role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}\n\n'
    usage = b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}],"usage":{"prompt_tokens":1}}\n\n'
    for reads, num_tokens in (
        ([role(0)], 0),
        ([role(0), piece, piece], 2),
        ([role(0) + role(1) + piece + piece], 2),
        ([role(0), role(1) + piece], 1),
        ([usage, piece], 1),
        ([with_role, with_role], 2),
        ([piece, role(0)], 2),  # it opens nothing there
    ):
        observer = Counting()
        relay = StreamRelay("a", Reply(cast(Any, None)), observer, ChunkEvents(), shows_usage=False)
        assert b"".join(relay.visible(read) for read in reads) == b"".join(reads)
        assert observer.num_tokens == num_tokens

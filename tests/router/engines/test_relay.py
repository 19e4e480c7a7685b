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

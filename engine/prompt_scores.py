"""Log probabilities of one prompt's tokens, chunk by chunk as they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.protocol.messages import PromptLogprobs

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]


class ScorePiece(NamedTuple):
    """Scores of n consecutive tokens, each with the k likeliest tokens at its place."""

    chosen: Array  # [n], float32
    top_logprobs: Array  # [n, k], float32, best first
    top_ids: Array  # [n, k]


@dataclass(slots=True)
class PromptScores:
    """The scores that a sequence has so far. It keeps them when it is preempted.

    The logits of token i score token i + 1, so a prompt of n tokens has n - 1 scores.
    """

    num_top: int
    num_launched: int = 0  # leading scores that the device has computed or will compute
    pieces: list[ScorePiece] = field(default_factory=list)  # those that were read, in order

    def packed(self) -> PromptLogprobs:
        """The scores of the whole prompt, for the router."""
        return PromptLogprobs(
            b"".join(piece.chosen.astype("<f4").tobytes() for piece in self.pieces),
            b"".join(piece.top_logprobs.astype("<f4").tobytes() for piece in self.pieces),
            b"".join(piece.top_ids.astype("<u4").tobytes() for piece in self.pieces),
        )

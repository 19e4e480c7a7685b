"""Log probabilities of the model's own distribution, for generated tokens and for prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor

from tandem.engine.device import to_host
from tandem.engine.sampling.distribution import top_values

MIN_LOGPROB = -9999.0  # stands for log(0), which JSON cannot express
_MORE_CANDIDATES = 16  # than log probabilities are asked for: tokens may be equally likely
# Float32 logits that are worked on together, at least one row. On a CPU temporaries of this size come from memory that
# glibc has: with twice as many, fresh pages cost a fifth of the time. On a GPU they take ten times as much memory.
_SLAB_BYTES = {"cpu": 1 << 19, "cuda": 32 << 20}

Rows = TypeVar("Rows", list[int], range)


def slabs(rows: Rows, logits: Tensor) -> Iterator[Rows]:
    """These rows of logits [n, vocab] in parts that are worked on together."""
    size = max(_SLAB_BYTES[logits.device.type] // (4 * logits.shape[1]), 1)
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


class RowLogprobs:
    """Log probabilities of m rows: of one token each, and of the likeliest ones. The device may still compute them."""

    def __init__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> None:
        """logits: [m, vocab], float32. token_ids: [m], int64. `num_top` is the most that any row is asked for."""
        self._all = logits.log_softmax(dim=-1)
        self._chosen = to_host(self._all.gather(1, token_ids[:, None])[:, 0])
        num_candidates = min(2 * num_top + _MORE_CANDIDATES, logits.shape[1]) if num_top else 0
        values, ids = top_values(self._all, num_candidates) if num_top else (self._all[:, :0],) * 2
        self._values, self._ids = to_host(values), to_host(ids)

    def chosen(self, row: int) -> float:
        """That of the row's token."""
        return float(self._chosen[row])

    def other(self, row: int, token_id: int) -> float:
        """Log probability of another token than the chosen one."""
        return float(self._all[row, token_id])  # sync: only of a rare row

    def top(self, row: int, num_top: int) -> tuple[Tensor, Tensor]:
        """[num_top] values and ids of a row's likeliest tokens, best first; of equal ones the lowest ids come first."""
        values, ids = self._values[row], self._ids[row]
        if 0 < num_top < len(values) and not float(values[num_top - 1]) > float(values[-1]):
            # Others may be as likely as the last one.
            everything = top_values(self._all[row : row + 1], self._all.shape[1])
            values, ids = everything[0][0].cpu(), everything[1][0].cpu()  # sync: only of a rare row
        return values[:num_top], ids[:num_top]

    def rows(self, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of all rows: [m] values of their tokens, [m, num_top] values and ids as `top` gives them."""
        values, ids = self._values[:, :num_top].clone(), self._ids[:, :num_top].clone()
        if num_top:
            is_clear = self._values[:, num_top - 1] > self._values[:, -1]
            for row in (~is_clear).nonzero()[:, 0].tolist():
                values[row], ids[row] = self.top(row, num_top)
        return self._chosen, values, ids

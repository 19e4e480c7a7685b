"""A sampler that takes one row after the other, in floating point: the oracle of the batched one.

Tokens of equal probability have no fixed order in it, so compare logits without ties.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engine.sampling.draw import uniform_draw
from tandem.engine.sampling.sampler import SampledToken
from tandem.engine.sequence import Sequence
from tandem.protocol.messages import TokenLogprobs
from tandem.protocol.sampling import SamplingParams

__all__ = ["RowSampler"]

# Most nuclei are far smaller than this; only flat distributions need the full sort of the vocabulary.
_NUCLEUS_GUESS = 512
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e6
_MIN_LOGPROB = -9999.0  # stands for log(0), which JSON cannot express


@dataclass(frozen=True, slots=True)
class RowSampler:
    """Samples next tokens. `eos_token_ids` are banned while a sequence is under its min_tokens."""

    eos_token_ids: frozenset[int]

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[SampledToken]:
        """logits: [n, vocab], row i for sequence i."""
        return [self._sample_row(row, sequence) for row, sequence in zip(logits, sequences, strict=True)]

    def _sample_row(self, raw: Tensor, sequence: Sequence) -> SampledToken:
        sampling, raw = sequence.sampling, raw.float()
        logits = self.adjust(raw, sequence)
        if sampling.temperature == 0:
            token_id = _most_likely(logits)
        else:
            token_id = _draw_token(logits, sampling, uniform_draw(sampling.seed, sequence.num_output_tokens))
        if token_id is None:
            token_id = _last_resort(logits, raw)
        return SampledToken(token_id, _logprobs(raw, token_id, sampling.num_logprobs))

    def adjust(self, raw: Tensor, sequence: Sequence) -> Tensor:
        """Logits after bias, penalties and bans: [vocab]."""
        sampling = sequence.sampling
        logits = raw
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        if sampling.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.token_ids)), device=raw.device)
            values = logits[seen]
            penalty = sampling.repetition_penalty
            logits = logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))
        if output and (sampling.frequency_penalty or sampling.presence_penalty):
            counts = Counter(output)
            penalties = [sampling.frequency_penalty * n + sampling.presence_penalty for n in counts.values()]
            ids = torch.tensor(list(counts), device=raw.device)
            logits = logits.index_add(0, ids, -torch.tensor(penalties, dtype=raw.dtype, device=raw.device))
        if sampling.logit_bias:
            logits = logits.index_add(0, *_bias_of(sequence, raw))
        if sequence.num_output_tokens < sampling.min_tokens:
            banned = sorted(self.eos_token_ids.union(sampling.stop_token_ids))
            logits = logits.index_fill(0, torch.tensor(banned, dtype=torch.long, device=raw.device), float("-inf"))
        return logits


def _bias_of(sequence: Sequence, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and values of its logit_bias: [m], [m]."""
    bias = sequence.sampling.logit_bias
    return torch.tensor(list(bias)), torch.tensor(list(bias.values()), dtype=raw.dtype)


def _draw_token(logits: Tensor, sampling: SamplingParams, draw: float) -> int | None:
    """Invert the cumulative distribution of one row at `draw` in [0, 1). logits: [vocab]; temperature > 0.

    Filters apply in the order temperature, top-k, top-p, min-p, each to what the previous one left. None if the logits
    are no distribution: one of them is nan or infinite, or all are banned.
    """
    # Subtract the largest logit first: a temperature near 0 then means greedy, while 1e-40 would give inf - inf.
    temperature = min(max(sampling.temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE)
    scaled = (logits - logits.max()) / temperature
    probabilities = scaled.softmax(dim=-1)
    if sampling.top_k <= 0 and sampling.top_p >= 1.0:
        kept, ids = probabilities, None
    else:
        kept, ids = _nucleus(probabilities, sampling.top_k, sampling.top_p)
    if sampling.min_p > 0.0:
        kept = kept.where(kept >= sampling.min_p * kept.max(), 0.0)
    cumulative = kept.double().cumsum(dim=-1)
    if not float(cumulative[-1]) > 0.0:
        return None
    idx = int(torch.searchsorted(cumulative, cumulative[-1] * draw, right=True))
    # Rounding may put the draw past the end: then the last token with any probability is meant.
    idx = min(idx, int(kept.nonzero()[-1]))
    return idx if ids is None else int(ids[idx])


def _nucleus(probabilities: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """The tokens that top-k and top-p leave, most probable first: (probabilities [m], ids [m])."""
    vocab = probabilities.shape[0]
    kept, ids = probabilities.topk(min(top_k if top_k > 0 else _NUCLEUS_GUESS, vocab))
    if top_p >= 1.0:
        return kept, ids
    cumulative = kept.double().cumsum(dim=-1)
    whole = cumulative[-1] if top_k > 0 else 1.0  # top-p applies to what top-k left
    if cumulative[-1] < top_p * whole:  # the guess was too small
        kept, ids = probabilities.sort(descending=True)
        cumulative = kept.double().cumsum(dim=-1)
    inside = cumulative - kept < top_p * whole  # a token is in if the tokens before it do not reach top_p
    inside[0] = True
    return kept[inside], ids[inside]


def _most_likely(logits: Tensor) -> int | None:
    """The token of the largest logit; None if it is nan or banned."""
    token_id = int(logits.argmax())
    return token_id if float(logits[token_id]) > -math.inf else None


def _last_resort(logits: Tensor, raw: Tensor) -> int:
    """The most likely token that is finite and not banned, else the most likely one of the model's own logits."""
    numbers = logits.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    token_id = _most_likely(numbers)
    return int(raw.argmax()) if token_id is None else token_id


def _logprobs(raw: Tensor, token_id: int, num_logprobs: int | None) -> TokenLogprobs | None:
    if num_logprobs is None:
        return None
    logprobs = raw.log_softmax(dim=-1)
    top: list[tuple[int, float]] = []
    if num_logprobs > 0:
        values, ids = logprobs.topk(min(num_logprobs, raw.shape[0]))
        top = [(token, _finite(value)) for token, value in zip(ids.tolist(), values.tolist(), strict=True)]
    return TokenLogprobs(token_id, _finite(float(logprobs[token_id])), top)


def _finite(logprob: float) -> float:
    """The log probability, or the smallest allowed one if it is -inf or nan."""
    return logprob if logprob > _MIN_LOGPROB else _MIN_LOGPROB

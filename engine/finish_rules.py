"""What ends an answer, and which tokens of it are known without computing them."""

from __future__ import annotations

from collections.abc import Collection

from tandem.engine.sequence import Phase, Sequence
from tandem.protocol.messages import FinishReason


class FinishRules:
    """Of one model, served with one context length."""

    def __init__(self, eos_token_ids: Collection[int], max_model_len: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._max_model_len = max_model_len

    def forced_token(self, sequence: Sequence) -> int | None:
        """The token that must come next, if nobody needs its logits: it is computed together with the next one."""
        matcher, sampling = sequence.matcher, sequence.sampling
        if matcher is None or sequence.finish_reason is not None or sequence.phase is Phase.PREFILL_ONLY:
            return None
        if sampling.num_logprobs is not None:
            return None
        assert not sequence.num_pending_tokens, "steps of sequences with a grammar are waited for"
        forced = matcher.forced_token(sequence.unprobed_ids)
        return None if forced in self._eos_token_ids else forced

    def finish_reason(self, sequence: Sequence, position: int) -> FinishReason | None:
        """Why a sequence ends with the token at this position, if it does. That is no stop token."""
        if sequence.matcher is not None and sequence.matcher.is_complete(sequence.unmatched_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_full(sequence, position) else None

    def is_stop_token(self, sequence: Sequence, token_id: int) -> bool:
        """Whether a token ends the sequence. A grammar allows nothing after an end token, so `ignore_eos` is void."""
        sampling = sequence.sampling
        ends = token_id in self._eos_token_ids and (not sampling.ignore_eos or sequence.matcher is not None)
        return ends or token_id in sampling.stop_token_ids

    def is_full(self, sequence: Sequence, position: int) -> bool:
        """Whether no token may follow the one at this position."""
        num_outputs = position + 1 - sequence.num_prompt_tokens
        return num_outputs >= sequence.sampling.max_tokens or position + 1 >= self._max_model_len

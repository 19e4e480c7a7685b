"""Makes the engine's sequences out of requests, once they are known to be ones that it can compute."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec

from tandem.engine.prompt_scores import PromptScores
from tandem.engine.sequence import Phase, Sequence, SequenceStatus
from tandem.engine.speculation.sources import RequestTexts
from tandem.engine.structured_output import StructuredOutput
from tandem.engine.token_array import token_array
from tandem.protocol.digest import root_digest
from tandem.protocol.errors import ContextLengthExceeded, RequestError
from tandem.protocol.messages import Decode, Fork, Generate, Prefill, WorkerPriority
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.timeline import Timeline


class CheckedPrompt(NamedTuple):
    """A prompt whose ids are all in the model's vocabulary, and the digests of its full blocks."""

    token_ids: array[int]
    digests: list[bytes]


class SequenceFactory:
    """Sequences of one engine."""

    def __init__(
        self, structured_output: StructuredOutput, *, namespace: bytes, max_model_len: int, vocab_size: int
    ) -> None:
        """`namespace` is that of the engine's KV, as of `namespace_digest`."""
        self._structured_output = structured_output
        self._namespace = namespace
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    def sequence_of(
        self,
        request: Generate | Prefill | Decode,
        now: float,
        phase: Phase = Phase.WHOLE,
        prompt: CheckedPrompt | None = None,
    ) -> Sequence:
        """The sequence of a router's request and its forks, not queued yet.

        `prompt` is that of a request without `token_ids`. Raises what `make_sequence` raises.
        """
        sequence = self.make_sequence(
            request.request_id,
            request.token_ids if prompt is None else prompt.token_ids,
            request.sampling,
            output_ids=request.output_ids,
            cache_salt=request.cache_salt,
            phase=phase,
            priority=request.priority,
            digests=None if prompt is None else prompt.digests,
        )
        if request.forks and phase is Phase.WHOLE:
            sequence.texts = RequestTexts(sequence.token_ids[: sequence.num_prompt_tokens], request.sampling.prediction)
        sequence.forks = [self._fork_of(sequence, fork) for fork in request.forks]
        for one in (sequence, *sequence.forks):
            one.timeline = Timeline(now) if request.is_traced else None
        return sequence

    def make_sequence(
        self,
        request_id: str,
        token_ids: Seq[int],
        sampling: SamplingParams,
        *,
        output_ids: Seq[int] = (),
        cache_salt: str = "",
        phase: Phase = Phase.WHOLE,
        priority: WorkerPriority = WorkerPriority(),
        digests: list[bytes] | None = None,
    ) -> Sequence:
        """A sequence that is not queued yet.

        `output_ids` is the beginning of its answer, which another engine gave: it goes on as if it had been preempted.
        `digests` are those of the prompt's full blocks, of a caller that has checked the prompt's ids already.

        Raises ContextLengthExceeded if the prompt does not fit, RequestError for an answer that is complete, or for
        ids outside the model's vocabulary, because one such id would fail a whole step.
        """
        limit = self._max_model_len
        if not 0 < len(token_ids) < limit:
            raise ContextLengthExceeded(
                f"the prompt has {len(token_ids)} tokens; this model takes 1 to {limit - 1}, and room for one more"
            )
        most = min(sampling.max_tokens, limit - len(token_ids))
        if output_ids and len(output_ids) >= most:
            raise RequestError(f"the answer has {len(output_ids)} tokens already, and may have {most}")
        prompt = token_ids if digests is None else ()
        for ids in (prompt, output_ids, sampling.stop_token_ids, sampling.logit_bias, sampling.prediction):
            if ids and not (min(ids) >= 0 and max(ids) < self._vocab_size):
                raise RequestError(f"token ids {min(ids)} to {max(ids)}: this model's are 0 to {self._vocab_size - 1}")
        all_ids = token_array(token_ids)
        all_ids.extend(output_ids)
        root = root_digest(self._namespace, cache_salt=cache_salt)
        matcher = self._structured_output.matcher(sampling.grammar, priority.order, root) if sampling.grammar else None
        return Sequence(
            request_id=request_id,
            token_ids=all_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            root=root,
            digests=digests or [],
            phase=phase,
            priority=priority,
            is_admitted_before=bool(output_ids),
            matcher=matcher,
            prompt_scores=None if (num := sampling.num_prompt_logprobs) is None or output_ids else PromptScores(num),
        )

    def _fork_of(self, sequence: Sequence, fork: Fork) -> Sequence:
        """Another answer to the same prompt."""
        sampling = msgspec.structs.replace(sequence.sampling, seed=fork.seed, num_prompt_logprobs=None)
        grammar, order = sampling.grammar, sequence.priority.order
        return Sequence(
            request_id=fork.request_id,
            token_ids=sequence.token_ids[:],
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sampling,
            root=sequence.root,
            phase=sequence.phase,
            priority=sequence.priority,
            status=SequenceStatus.FORKING,
            leader=sequence,
            texts=sequence.texts,
            is_admitted_before=sequence.is_admitted_before,
            matcher=self._structured_output.matcher(grammar, order, sequence.root) if grammar else None,
        )

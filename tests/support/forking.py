"""Sequences with forks, as a worker makes them of a request."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from tandem.engine.engine import Engine
from tandem.engine.sequence import Phase, Sequence
from tandem.protocol.messages import Fork, Generate
from tandem.protocol.sampling import SamplingParams


def fork_sequence(
    engine: Engine,
    name: str,
    prompt: list[int],
    sampling: SamplingParams,
    forks: Seq[Fork],
    *,
    phase: Phase = Phase.WHOLE,
) -> Sequence:
    """A sequence and its forks, not queued yet."""
    request = Generate(request_id=name, token_ids=prompt, sampling=sampling, forks=list(forks))
    return engine.factory.sequence_of(request, 0.0, phase)

"""The oracle of the worker model: one engine step at a time, each sequence visited in each; no closed form."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.scheduling.cost_model import StepCosts

__all__ = ["Arrival", "serve"]


@dataclass(frozen=True)
class Arrival:
    """A request without any cached prefix; `handed_over` ones arrive with their KV and first token."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    handed_over: bool = False


@dataclass
class _Sequence:
    number: int
    arrival: Arrival
    num_computed: int = 0
    num_outputs: int = 0


def serve(
    arrivals: list[Arrival], costs: StepCosts, *, step_tokens: int, max_num_seqs: int, pool_blocks: int, block_size: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Times of the first token and of the last token, by position in `arrivals`."""
    pending = [_Sequence(number, arrival) for number, arrival in enumerate(arrivals)]
    waiting: list[_Sequence] = []
    prompts: list[_Sequence] = []
    decoding: list[_Sequence] = []
    first_s: dict[int, float] = {}
    end_s: dict[int, float] = {}
    now = 0.0

    def num_blocks(sequence: _Sequence) -> int:
        arrival = sequence.arrival
        return -(-(arrival.num_prompt_tokens + arrival.num_output_tokens) // block_size)

    while pending or waiting or prompts or decoding:
        if not waiting and not prompts and not decoding:
            now = max(now, min(sequence.arrival.arrival_s for sequence in pending))
        due = sorted(
            (sequence for sequence in pending if sequence.arrival.arrival_s <= now),
            key=lambda sequence: sequence.arrival.arrival_s,
        )
        for sequence in due:
            pending.remove(sequence)
            if sequence.arrival.handed_over:
                sequence.num_computed, sequence.num_outputs = sequence.arrival.num_prompt_tokens, 1
                decoding.append(sequence)
            else:
                waiting.append(sequence)
        budget = step_tokens - len(decoding)
        chunks: list[tuple[_Sequence, int]] = []
        for sequence in prompts:
            chunk = min(budget, sequence.arrival.num_prompt_tokens - sequence.num_computed)
            if chunk:
                chunks.append((sequence, chunk))
            budget -= chunk
        while budget and waiting and len(prompts) + len(decoding) < max_num_seqs:
            used = sum(num_blocks(sequence) for sequence in prompts + decoding)
            if used + num_blocks(waiting[0]) > pool_blocks:
                break
            sequence = waiting.pop(0)
            prompts.append(sequence)
            chunks.append((sequence, min(budget, sequence.arrival.num_prompt_tokens)))
            budget -= chunks[-1][1]
        now += costs.base_s
        for sequence, chunk in chunks:
            now += costs.prefill_token_s * chunk + costs.attention_s * chunk * (sequence.num_computed + chunk / 2)
        for sequence in decoding:
            length = sequence.arrival.num_prompt_tokens + sequence.num_outputs
            now += costs.decode_seq_s + costs.kv_token_s * length
            sequence.num_outputs += 1
        for sequence, chunk in chunks:
            sequence.num_computed += chunk
            if sequence.num_computed == sequence.arrival.num_prompt_tokens:
                prompts.remove(sequence)
                sequence.num_outputs = 1
                first_s[sequence.number] = now
                decoding.append(sequence)
        for sequence in list(decoding):
            if sequence.num_outputs == sequence.arrival.num_output_tokens:
                decoding.remove(sequence)
                end_s[sequence.number] = now
    return first_s, end_s

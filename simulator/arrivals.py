"""When requests arrive: a trace's timestamps, spread where they are coarse, and scaled to a given load."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

from tandem.loadtest.traces import TRACE_BLOCK_SIZE, TraceRequest
from tandem.scheduling.cost_model import prefill_attention
from tandem.simulator.cluster import Cluster
from tandem.simulator.machine import Machine

MAX_SPREAD_S = 3.0  # the grid of Mooncake's conversation trace


def spread(requests: Sequence[TraceRequest], rng: random.Random) -> list[TraceRequest]:
    """The requests with those of one timestamp spread evenly until the next one (at most 3 s), in the same order.

    Some traces are published on a grid of seconds. Ten requests in one millisecond are an artefact that would dominate
    every queue.
    """
    groups = [list(group) for _, group in itertools.groupby(requests, key=lambda request: request.arrival_s)]
    result: list[TraceRequest] = []
    for group, following in itertools.zip_longest(groups, groups[1:]):
        if len(group) == 1:
            result += group
            continue
        width_s = min(following[0].arrival_s - group[0].arrival_s, MAX_SPREAD_S) if following else MAX_SPREAD_S
        offsets_s = sorted(rng.uniform(0.0, width_s) for _ in group)
        result += [
            replace(request, arrival_s=request.arrival_s + offset_s)
            for request, offset_s in zip(group, offsets_s, strict=True)
        ]
    return result


def at_load(requests: Sequence[TraceRequest], load: float | None, cluster: Cluster) -> list[TraceRequest]:
    """The requests from second 0 on, at a pace that makes the cluster's load without caches equal to `load`.

    None keeps the pace of the trace.
    """
    first_s = requests[0].arrival_s
    span_s = max(requests[-1].arrival_s - first_s, 1e-9)
    factor = 1.0 if load is None else load_of(requests, cluster) / (load * span_s)
    return [replace(request, arrival_s=(request.arrival_s - first_s) * factor) for request in requests]


def load_of(requests: Sequence[TraceRequest], cluster: Cluster) -> float:
    """Seconds that the busier pool needs for all requests if nothing is cached and its workers share evenly.

    Prefill is computed in full steps without decoding. Decoding runs in the batch that fills the pool, or all seats.
    A colocated worker does one after the other.
    """
    machine = cluster.machine
    chunk = cluster.step_tokens
    prefill_s = sum(_prefill_s(machine, request.num_prompt_tokens, chunk) for request in requests)
    lengths = [request.num_prompt_tokens + request.num_output_tokens / 2 for request in requests]
    num_outputs = sum(request.num_output_tokens for request in requests)
    # Mean length of a sequence in the batch, weighted by its output: long answers stay longer.
    length = sum(n * request.num_output_tokens for n, request in zip(lengths, requests, strict=True)) / max(
        num_outputs, 1
    )
    batch = max(min(machine.max_num_seqs, machine.pool_tokens / length), 1.0)
    costs = machine.costs
    decode_s = num_outputs * (costs.base_s / batch + costs.decode_seq_s + costs.kv_token_s * length)
    if not cluster.num_prefill:
        return (prefill_s + decode_s) / cluster.num_decode
    return max(prefill_s / cluster.num_prefill, decode_s / cluster.num_decode)


def _prefill_s(machine: Machine, num_tokens: int, chunk: int) -> float:
    costs = machine.costs
    work_s = costs.prefill_token_s * num_tokens + costs.attention_s * prefill_attention(num_tokens, 0)
    return costs.base_s * num_tokens / chunk + work_s


def chats(num_requests: int, rng: random.Random) -> list[TraceRequest]:
    """A made-up load for where there is no trace: conversations with one system prompt, one request a second.

    1,024 shared tokens; about 4 turns, half a minute apart; about 400 tokens of each question and 300 of each answer.
    """
    requests: list[TraceRequest] = []
    ids = itertools.count(2)
    begun_s = 0.0
    while len(requests) < 2 * num_requests:  # later ones of long conversations are cut off below
        begun_s += rng.expovariate(0.25)
        arrival_s, num_tokens, blocks = begun_s, 2 * TRACE_BLOCK_SIZE, [0, 1]
        for _ in range(min(int(rng.expovariate(0.25)) + 1, 16)):
            num_tokens += int(rng.lognormvariate(5.7, 0.8)) + 1
            num_answer = int(rng.lognormvariate(5.4, 0.8)) + 1
            blocks += [next(ids) for _ in range(-(-num_tokens // TRACE_BLOCK_SIZE) - len(blocks))]
            requests.append(TraceRequest(arrival_s, num_tokens, num_answer, tuple(blocks)))
            arrival_s += num_answer * 0.03 + rng.expovariate(1 / 30)
            num_tokens += num_answer
    return sorted(requests, key=lambda request: request.arrival_s)[:num_requests]

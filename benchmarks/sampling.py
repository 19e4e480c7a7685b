"""What sampling costs a CPU: all rows together, beside one row after the other in floating point.

    python -m benchmarks.sampling

The other side is the sampler of the tests (`tests/support/row_sampler.py`) behind one argmax of all rows, as the engine
had it before. Both sides take turns in one process. CPU time is counted, so that other work on the machine changes
little. First the sampler alone, on random logits in bfloat16; then decode steps of the model, whose streams go on from
turn to turn.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import arguments, console, print_table, ratio, write_result
from tandem.cluster.model_store import resolve_model
from tandem.engine.engine import Engine
from tandem.engine.sampling.sampler import SampledToken, Sampler
from tandem.engine.sequence import Sequence
from tandem.protocol.config import EngineConfig
from tandem.protocol.sampling import SamplingParams
from tests.support.row_sampler import RowSampler

_NUM_STREAMS = (1, 8, 32)
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.7, top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1": {"temperature": 1.0},
    "top_k 40": {"temperature": 1.0, "top_k": 40},
    "greedy, 5 log probabilities": {"temperature": 0.0, "num_logprobs": 5},
    "0.7, 0.9, repetition penalty": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
}
_STEP_KINDS = list(_KINDS)[:2]
_EOS = frozenset({2})


class Result(NamedTuple):
    """Median CPU seconds of both sides."""

    kind: str
    num_streams: int
    rows_s: float
    batch_s: float


class _Launched(NamedTuple):
    tokens: list[SampledToken | Exception]

    def read(self) -> list[SampledToken | Exception]:
        return self.tokens


class RowByRow:
    """The tests' sampler in the place of a batched one."""

    def plan(self, sequences: list[Sequence], vocab_size: int) -> list[Sequence]:
        """All that `launch` needs."""
        return sequences

    def launch(self, logits: Tensor, sequences: list[Sequence]) -> _Launched:
        """Tokens of all rows."""
        greedy = logits.argmax(dim=-1).tolist()
        if all(s.sampling.temperature == 0 and s.sampling.num_logprobs is None for s in sequences):
            return _Launched([SampledToken(token_id, None) for token_id in greedy])
        return _Launched([*RowSampler(_EOS).sample(logits, sequences)])


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1, help="of the model and the sampler (default: %(default)s)")
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds = 2
    torch.set_num_threads(settings.threads)
    samplers = [measure_sampler(settings, kind, num) for num in _NUM_STREAMS for kind in _KINDS]
    folder = resolve_model(settings.model, report=console.print)
    engine = Engine(EngineConfig(model=str(folder), device="cpu", num_threads=settings.threads))
    steps = [measure_steps(engine, settings, kind, num) for num in _NUM_STREAMS for kind in _STEP_KINDS]
    headings = ["", "streams", "row by row us", "together us", "ratio"]
    for title, results in (("Sampling a step", samplers), ("A decode step", steps)):
        rows = [(r.kind, r.num_streams, r.rows_s * 1e6, r.batch_s * 1e6, ratio(r.batch_s, r.rows_s)) for r in results]
        print_table(title, headings, rows)
    write_result("sampling", settings, {"sampler": samplers, "steps": steps})
    return 0


def measure_sampler(settings: argparse.Namespace, kind: str, num_streams: int) -> Result:
    """Sample the same logits again and again."""
    generator = torch.Generator().manual_seed(settings.seed)
    logits = (torch.randn(num_streams, settings.vocab, generator=generator) * 3).bfloat16()
    sequences = [
        Sequence("r", list(range(200)), 100, SamplingParams(max_tokens=1000, seed=i, **_KINDS[kind]), root=b"")
        for i in range(num_streams)
    ]
    sides: tuple[Any, Any] = RowByRow(), Sampler(_EOS)
    with torch.inference_mode():

        def sample(sampler: Any) -> None:
            sampler.launch(logits, sampler.plan(sequences, settings.vocab)).read()

        calls = (lambda: sample(sides[0]), lambda: sample(sides[1]))
        return Result(kind, num_streams, *interleaved(calls, settings.rounds))


def measure_steps(engine: Engine, settings: argparse.Namespace, kind: str, num_streams: int) -> Result:
    """Decode steps of streams that begin with 128 random tokens."""
    generator = torch.Generator().manual_seed(settings.seed)
    sampling = SamplingParams(max_tokens=2 * settings.rounds + 8, ignore_eos=True, seed=1, **_KINDS[kind])
    for i in range(num_streams):
        prompt = torch.randint(3, 1000, (128,), generator=generator).tolist()
        engine.add(engine.make_sequence(f"{kind} {num_streams} {i}", prompt, sampling))
    while any(not sequence.is_decoding for sequence in engine.sequences.values()):
        engine.step()
    sides: tuple[Any, Any] = RowByRow(), Sampler(engine.model.eos_token_ids)

    def step(sampler: Any) -> None:
        engine.sampler = sampler
        engine.step()

    calls = (lambda: step(sides[0]), lambda: step(sides[1]))
    result = Result(kind, num_streams, *interleaved(calls, settings.rounds))
    for request_id in list(engine.sequences):
        engine.abort(request_id)
    return result


def interleaved(calls: tuple[Callable[[], object], ...], num_rounds: int) -> list[float]:
    """Median CPU seconds of each call; they take turns, and each goes first as often as last."""
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(num_rounds):
        for idx in range(len(calls)) if number % 2 else reversed(range(len(calls))):
            begun = time.process_time()
            calls[idx]()
            seconds[idx].append(time.process_time() - begun)
    return [statistics.median(each) for each in seconds]


if __name__ == "__main__":
    sys.exit(main())

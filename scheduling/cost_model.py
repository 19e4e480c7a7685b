"""Predicted seconds of engine steps and KV transfers, learned online per worker kind.

Placement and autoscaling compare these costs. Knows features and durations only; no workers, no clock.

    step_s     = base + a * new tokens + b * attention + c * decoding sequences + d * their KV tokens
    transfer_s = latency + bytes / bandwidth
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tandem.protocol.messages import StepStats
from tandem.scheduling.lru_dict import LruDict

Vector = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
Number = TypeVar("Number", float, Vector)  # for one worker, or for each of many

PRIOR_STD = 3.0  # standard deviation of each weight, as a multiple of its prior
RELATIVE_NOISE = 0.1  # relative standard deviation of one measured duration
MAX_DEVIATION = 3.0  # standard deviations; a larger deviation counts as this one
MAX_SURPRISES = 5  # this many larger deviations in a row, all to one side, mean that the pace has changed
PACE_GAIN = 0.1  # share of the logarithm of one measurement's deviation that the pace follows
MAX_PACE_STEP = 2.0  # a larger deviation counts as this factor
MAX_PACE = 1e9
MIN_VARIANCE = 1e-12
_NUM_KNOWN = 50  # steps of a kind of worker after which a new worker is compared with it
_NUM_NORMAL = 3  # steps in a row within the band end a worker's warm-up
_NORMAL_RATIO = 1.5  # the band: measured / expected
_MAX_COLD_STEPS = 64  # more slow steps are not a warm-up: this worker, or all workers, have become slower
_MAX_COLD_WORKERS = 4096
MIN_PREDICTION_S = 1e-6
MIN_DURATION_S, MAX_DURATION_S = 1e-9, 1e6  # range of plausible measurements
ERROR_WEIGHT = 0.05  # weight of the newest measurement in the exported prediction error


class StepCosts(NamedTuple):
    """Coefficients of one step's duration, in seconds per unit; or arrays of coefficients, for many workers at once."""

    base_s: float
    prefill_token_s: float
    attention_s: float  # per new token and token of context
    decode_seq_s: float
    kv_token_s: float  # per KV token of a decoding sequence

    def step_s(self, num_decode_seqs: Number, num_kv_tokens: Number) -> Number:
        """Duration of a step without prefill."""
        return self.base_s + self.decode_seq_s * num_decode_seqs + self.kv_token_s * num_kv_tokens

    def prefill_work_s(self, num_new_tokens: Number, attention: Number) -> Number:
        """Time that prefill work adds to the steps it is part of, which delays each sequence in these steps too."""
        return self.prefill_token_s * num_new_tokens + self.attention_s * attention

    def added_decode_s(self, step_s: Number, num_decode_seqs: Number, num_tokens: float, num_outputs: float) -> Number:
        """Seconds that decoding one more sequence costs: its own steps, and what it adds to the others' steps.

        `step_s` is the duration of a step of the others; `num_tokens` is the mean length of the new sequence.
        """
        added_s = self.decode_seq_s + self.kv_token_s * num_tokens
        return num_outputs * (step_s + added_s + num_decode_seqs * added_s)


class TransferCosts(NamedTuple):
    """Coefficients of one transfer's duration; or arrays of coefficients, for many links at once."""

    latency_s: float
    byte_s: float

    def transfer_s(self, num_bytes: Number) -> Number:
        """Duration of one transfer."""
        return self.latency_s + self.byte_s * num_bytes

    def exposed_s(self, num_bytes: float, last_chunk_bytes: float | Vector, prefill_s: Number) -> Number:
        """The part of the transfer that prefill does not hide: each chunk is sent while the next is computed."""
        least_bytes: Any = np.minimum(num_bytes, last_chunk_bytes)
        exposed: Number = np.maximum(self.transfer_s(num_bytes) - prefill_s, self.transfer_s(least_bytes))
        return exposed


# One CPU core and a 135 M parameter model in bfloat16: weights are read in ~17 ms, a 2,048-token prompt takes ~1.6 s.
CPU_PRIOR = StepCosts(20e-3, 0.75e-3, 50e-9, 0.6e-3, 1.5e-6)
# A current data-centre GPU and a model of a few billion parameters.
ACCELERATOR_PRIOR = StepCosts(8e-3, 30e-6, 1e-9, 30e-6, 30e-9)

TRANSFER_LATENCY_S = 3e-3
TRANSFER_BYTES_PER_S = 2e9  # between processes of one CPU machine
ACCELERATOR_BYTES_PER_S = 20e9  # a 200 Gb/s port; NVLink has ten times that


class LinearModel:
    """A non-negative linear model of a duration: a pace that changes fast, and weights that are learned slowly.

    Other work on the machine makes all costs larger or smaller at once, for seconds. The pace, one factor of all
    coefficients, follows that. The weights, fitted by recursive least squares, say how the costs relate. Weights are
    multiples of the prior coefficients, and measurements are divided by their prediction, so every number in the filter
    is near one.

    The filter forgets in the direction of each measurement only (Cao and Schwartz, Automatica 36, 2000). What the
    current measurements do not show (how a step of one sequence divides into base and sequence, say) stays known.

    One outlier hardly moves the model. Several in a row to the same side are not outliers: the pace has changed.
    """

    def __init__(self, prior: Sequence[float], *, forgetting: float = 0.995) -> None:
        self._prior: Vector = np.array(prior, dtype=np.float64)
        self._weights: Vector = np.ones(len(prior))
        self._covariance: Vector = np.eye(len(prior)) * PRIOR_STD**2
        self._pace = 1.0
        self._growth = 1 / forgetting - 1
        self.coefficients: tuple[float, ...] = tuple(prior)
        self.num_measurements = 0
        self._surprises: list[float] = []  # measured / predicted of outliers in a row, all above 1 or all below
        self.relative_error = 0.0  # moving average of |measured - predicted| / measured

    def predict(self, features: Sequence[float]) -> float:
        """Duration of these features, in seconds."""
        return sum(c * x for c, x in zip(self.coefficients, features, strict=True))

    def observe(self, features: Sequence[float], duration_s: float) -> bool:
        """Learn from one measurement. Returns False for an implausible one, which changes nothing."""
        if not MIN_DURATION_S <= duration_s <= MAX_DURATION_S:
            return False
        if not all(math.isfinite(x) and 0 <= x < 1e15 for x in features):
            return False
        predicted_s = max(self.predict(features), MIN_PREDICTION_S)
        terms = np.array(features, dtype=np.float64) * self._prior * (self._pace / predicted_s)
        self._forget(terms)
        spread = self._covariance @ terms
        variance = float(terms @ spread) + RELATIVE_NOISE**2
        limit = MAX_DEVIATION * math.sqrt(variance)
        surplus = duration_s / predicted_s - float(terms @ self._weights)
        deviation = min(max(surplus, -limit), limit)

        self._weights = self._weights + spread * (deviation / variance)
        self._covariance -= np.outer(spread, spread) / variance
        self._lift_negative_weights()
        self._follow(1 + deviation, float(terms @ self._weights))
        self._note_surprise(surplus - deviation, duration_s / predicted_s)
        self.coefficients = tuple((self._weights * self._prior * self._pace).tolist())
        self._note_error(abs(duration_s - predicted_s) / duration_s)
        return True

    def _forget(self, terms: Vector) -> None:
        """Let the variance in the direction of a measurement grow a little."""
        certainty = float(terms @ np.linalg.solve(self._covariance + MIN_VARIANCE * np.eye(len(terms)), terms))
        self._covariance += np.outer(terms, terms) * (self._growth / max(certainty, MIN_VARIANCE))

    def _follow(self, measured: float, expected: float) -> None:
        """Let the pace take a part of the deviation that the weights have left."""
        ratio = max(measured, MIN_VARIANCE) / max(expected, MIN_VARIANCE)
        self._scale(min(max(ratio, 1 / MAX_PACE_STEP), MAX_PACE_STEP) ** PACE_GAIN)

    def _note_surprise(self, excess: float, ratio: float) -> None:
        """Remember a measurement beyond the limit, and follow such measurements once they are the rule."""
        if excess == 0 or (self._surprises and (ratio > 1) != (self._surprises[-1] > 1)):
            self._surprises.clear()
        if excess == 0:
            return
        self._surprises.append(ratio)
        if len(self._surprises) == MAX_SURPRISES:
            self._scale(float(np.exp(np.mean(np.log(self._surprises)))))
            self._surprises.clear()

    def _scale(self, ratio: float) -> None:
        self._pace = min(max(self._pace * ratio, 1 / MAX_PACE), MAX_PACE)

    def _lift_negative_weights(self) -> None:
        """Move to the most likely weights that are not negative.

        Lifting one weight also moves the weights correlated with it. Otherwise these would stay wrong: for a link whose
        bytes cost nothing, the latency would stay at twice its true value.
        """
        for _ in self._weights:
            idx = int(np.argmin(self._weights))
            if self._weights[idx] >= 0:
                return
            column = self._covariance[:, idx]
            self._weights = self._weights - column * (self._weights[idx] / max(column[idx], MIN_VARIANCE))
        self._weights = np.maximum(self._weights, 0.0)

    def _note_error(self, relative_error: float) -> None:
        self.num_measurements += 1
        weight = max(ERROR_WEIGHT, 1 / self.num_measurements)
        self.relative_error += weight * (min(relative_error, 10.0) - self.relative_error)


class StepModel:
    """Duration of the engine steps of one kind of worker."""

    def __init__(self, prior: StepCosts) -> None:
        self._model = LinearModel(prior)
        self.costs = prior

    @property
    def relative_error(self) -> float:
        """Moving average of the prediction's relative error."""
        return self._model.relative_error

    @property
    def num_measurements(self) -> int:
        """Steps learned from."""
        return self._model.num_measurements

    def observe(self, stats: StepStats) -> None:
        """Learn from one step; steps without work and implausible ones are ignored."""
        if stats.num_prefill_tokens <= 0 and stats.num_decode_seqs <= 0:
            return
        features = (
            1.0,
            float(stats.num_prefill_tokens),
            stats.prefill_attention,
            float(stats.num_decode_seqs),
            float(stats.num_decode_kv_tokens),
        )
        if self._model.observe(features, stats.duration_s):
            self.costs = StepCosts(*self._model.coefficients)

    def prefill_s(
        self,
        num_new_tokens: float,
        num_context_tokens: float,
        chunk_tokens: int,
        *,
        num_decode_seqs: float = 0,
        num_kv_tokens: float = 0,
    ) -> float:
        """Time to compute a prompt in chunks, each in a step with the sequences already decoding there."""
        num_steps = math.ceil(num_new_tokens / chunk_tokens)
        attention = prefill_attention(num_new_tokens, num_context_tokens)
        step_s = self.costs.step_s(num_decode_seqs, num_kv_tokens)
        return num_steps * step_s + self.costs.prefill_work_s(num_new_tokens, attention)


class TransferModel:
    """Time that a link takes to write the rest of a handoff once the prompt is computed.

    It learns from the sending workers' measurements (`LinkLoad.exposed_s`), latency and final notification included.
    """

    def __init__(self, bytes_per_s: float = TRANSFER_BYTES_PER_S) -> None:
        """`bytes_per_s` is the prior, used until there are measurements."""
        self.costs = TransferCosts(TRANSFER_LATENCY_S, 1 / bytes_per_s)
        self._model = LinearModel(self.costs)

    @property
    def relative_error(self) -> float:
        """Moving average of the prediction's relative error."""
        return self._model.relative_error

    @property
    def num_measurements(self) -> int:
        """Transfers learned from."""
        return self._model.num_measurements

    def observe(self, num_bytes: float, duration_s: float) -> None:
        """Learn from one transfer; implausible ones are ignored."""
        if self._model.observe((1.0, num_bytes), duration_s):
            self.costs = TransferCosts(*self._model.coefficients)


class WarmUps:
    """Tells first steps that are slow (memory to map, kernels to compile) from the pace of a worker.

    A model that learned from them would take each new worker for a reason to add more.
    """

    def __init__(self) -> None:
        self._cold = LruDict[str, tuple[int, int]](_MAX_COLD_WORKERS)  # steps seen, and how many in a row were normal

    def is_warm(self, worker: str, stats: StepStats, model: StepModel) -> bool:
        """Whether to learn from this step. Nothing is known to compare the first workers of a kind with."""
        num_seen, num_normal = self._cold.get(worker, (0, 0))
        if num_normal >= _NUM_NORMAL or num_seen >= _MAX_COLD_STEPS:
            return True
        if model.num_measurements < _NUM_KNOWN:
            self._cold[worker] = (0, _NUM_NORMAL)
            return True
        costs = model.costs
        expected_s = costs.step_s(float(stats.num_decode_seqs), float(stats.num_decode_kv_tokens))
        expected_s += costs.prefill_work_s(float(stats.num_prefill_tokens), stats.prefill_attention)
        is_normal = stats.duration_s <= _NORMAL_RATIO * expected_s
        self._cold[worker] = (num_seen + 1, num_normal + 1 if is_normal else 0)
        return is_normal and num_normal + 1 >= _NUM_NORMAL


class CostModel:
    """The models of all kinds of workers and links, made on first use and kept when workers join and leave."""

    def __init__(self) -> None:
        self._steps: dict[str, StepModel] = {}
        self._transfers: dict[tuple[str, str], TransferModel] = {}
        self._warm_ups = WarmUps()

    def steps(self, kind: str) -> StepModel:
        """The model of the steps of this kind of worker."""
        model = self._steps.get(kind)
        if model is None:
            prior = CPU_PRIOR if _is_cpu(kind) else ACCELERATOR_PRIOR
            model = self._steps[kind] = StepModel(prior)
        return model

    def learn(self, worker: str, kind: str, stats: StepStats) -> None:
        """Learn from a step of this worker, once its steps take as long as those of others of its kind."""
        model = self.steps(kind)
        if self._warm_ups.is_warm(worker, stats, model):
            model.observe(stats)

    def transfer(self, from_kind: str, to_kind: str) -> TransferModel:
        """The model of handoffs from one kind of worker to another."""
        model = self._transfers.get((from_kind, to_kind))
        if model is None:
            both = (from_kind, to_kind)
            bytes_per_s = TRANSFER_BYTES_PER_S if any(map(_is_cpu, both)) else ACCELERATOR_BYTES_PER_S
            model = self._transfers[both] = TransferModel(bytes_per_s)
        return model

    def steps_of(self, kinds: Sequence[str], kind_idx: Rows) -> StepCosts:
        """Step costs of many workers at once, as arrays, or as numbers where all workers are of one kind.

        Worker i is of kind `kinds[kind_idx[i]]`.
        """
        if len(kinds) == 1:
            return self.steps(kinds[0]).costs
        return StepCosts(*_columns([self.steps(kind).costs for kind in kinds], kind_idx))

    def transfers_of(self, links: Sequence[tuple[str, str]], link_idx: Rows) -> TransferCosts:
        """Transfer costs of many links at once, in the same form; link i is `links[link_idx[i]]`."""
        if len(links) == 1:
            return self.transfer(*links[0]).costs
        return TransferCosts(*_columns([self.transfer(*link).costs for link in links], link_idx))

    def export(self) -> dict[str, object]:
        """Coefficients and prediction errors, as JSON."""
        steps = {
            kind: {
                **model.costs._asdict(),
                "relative_error": model.relative_error,
                "num_measurements": model.num_measurements,
            }
            for kind, model in self._steps.items()
        }
        transfers = {
            f"{source} -> {target}": {
                **model.costs._asdict(),
                "relative_error": model.relative_error,
                "num_measurements": model.num_measurements,
            }
            for (source, target), model in self._transfers.items()
        }
        return {"steps": steps, "transfers": transfers}


def _is_cpu(kind: str) -> bool:
    return kind.lower().startswith("cpu")


def _columns(costs: Sequence[tuple[float, ...]], idx: Rows) -> Any:
    """For each coefficient, an array with the coefficient of `costs[i]` for each i of `idx`."""
    return np.array(costs).T[:, idx]


def prefill_attention(num_new_tokens: Number, num_context_tokens: Number) -> Number:
    """Attention work of computing new tokens after a context, in tokens squared; chunking does not change it."""
    return num_new_tokens * (num_context_tokens + num_new_tokens / 2)

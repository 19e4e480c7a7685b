"""A report of one or more runs as one HTML file with its plots inside. Needs the extra `report` (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.loadtest.html_report import html_page, png_plots
from tandem.simulator.measures import MeasuredTimeline, Slo, Summary, gap_distribution, summarize, timeline, ttft_s
from tandem.simulator.simulation import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which most colour-blind readers can tell apart; ours stands out by width too.
_COLORS = {
    "tandem": "#D55E00",
    "dynamo": "#0072B2",
    "llm_d": "#009E73",
    "cache_aware": "#CC79A7",
    "power_of_two": "#E69F00",
    "least_loaded": "#56B4E9",
    "round_robin": "#7F7F7F",
    "kv": "#8C564B",
    "prefix": "#BCBD22",
}
_SMOOTH_WINDOWS = 5  # windows averaged for each point of a timeline

# Column headings, and how the values of a summary are written.
COLUMNS: Mapping[str, Callable[[Summary], str]] = {
    "policy": lambda run: run.policy,
    "TTFT mean s": lambda run: _number(run.ttft_mean_s),
    "p50 s": lambda run: _number(run.ttft_p50_s),
    "p99 s": lambda run: _number(run.ttft_p99_s),
    "ITL p50 ms": lambda run: f"{run.itl_p50_s * 1e3:.1f}",
    "p99 ms": lambda run: f"{run.itl_p99_s * 1e3:.0f}",
    "hit %": lambda run: f"{run.token_hit_ratio * 100:.1f}",
    "read %": lambda run: f"{run.loaded_ratio * 100:.1f}",
    "imbalance": lambda run: f"{run.imbalance:.2f}",
    "SLO %": lambda run: f"{run.slo_attainment * 100:.1f}",
    "goodput/s": lambda run: f"{run.goodput:.2f}",
}


def html_report(title: str, facts: Mapping[str, object], outcomes: Sequence[Outcome], slo: Slo) -> str:
    """A page with the facts of the run, a table, and the plots with one curve per policy."""
    rows = [[write(summarize(outcome, slo)) for write in COLUMNS.values()] for outcome in outcomes]
    ours = next((idx for idx, outcome in enumerate(outcomes) if outcome.policy == "tandem"), None)
    return html_page(title, facts, list(COLUMNS), rows, plots(outcomes, slo), bold_row=ours)


def plots(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, bytes]:
    """PNG files by name. Raises `ConfigError` without matplotlib."""
    timelines = [timeline(outcome, slo) for outcome in outcomes]
    return png_plots(
        {
            "TTFT": lambda axes: _draw_ttft(axes, outcomes, slo),
            "ITL": lambda axes: _draw_itl(axes, outcomes, slo),
            "Goodput": lambda axes: _draw_goodput(axes, outcomes, timelines),
            "Hit ratio": lambda axes: _draw_hits(axes, outcomes, timelines),
            "Imbalance": lambda axes: _draw_imbalance(axes, outcomes, timelines),
        }
    )


def _draw_ttft(axes: Axes, outcomes: Sequence[Outcome], slo: Slo) -> None:
    for outcome in outcomes:
        values = sorted(max(ttft_s(job), 1e-4) for job in outcome.jobs)
        shares = np.arange(1, len(values) + 1) / len(values) * 100
        axes.plot(values, shares, **_style(outcome))
    axes.axvline(slo.ttft_s, color="black", linestyle=":", linewidth=1)
    axes.annotate(f"SLO {slo.ttft_s:g} s", (slo.ttft_s, 3), xytext=(4, 0), textcoords="offset points", fontsize=8)
    axes.set(
        title="Time to first token", xscale="log", xlabel="seconds", ylabel="% of requests, at most", ylim=(0, 100)
    )


def _draw_itl(axes: Axes, outcomes: Sequence[Outcome], slo: Slo) -> None:
    """The share of gaps longer than x: readers of a stream notice the tail."""
    for outcome in outcomes:
        values, shares = gap_distribution(outcome.gaps)
        if len(values):
            axes.plot(values * 1e3, np.maximum(1 - np.concatenate(([0.0], shares[:-1])), 1e-9) * 100, **_style(outcome))
    axes.axvline(slo.itl_s * 1e3, color="black", linestyle=":", linewidth=1)
    axes.annotate(
        f"SLO {slo.itl_s * 1e3:g} ms", (slo.itl_s * 1e3, 40), xytext=(4, 0), textcoords="offset points", fontsize=8
    )
    axes.set(
        title="Inter-token latency", xscale="log", yscale="log", xlabel="milliseconds", ylabel="% of gaps, longer than",
        ylim=(1e-3, 130),
    )  # fmt: skip


def _draw_goodput(axes: Axes, outcomes: Sequence[Outcome], timelines: Sequence[MeasuredTimeline]) -> None:
    first = timelines[0]
    axes.fill_between(first.centre_s / 60, _smooth(first.offered), color="#E8E8E8", label="offered")
    for outcome, line in zip(outcomes, timelines, strict=True):
        axes.plot(line.centre_s / 60, _smooth(line.goodput), **_style(outcome))
    axes.set(title="Requests that met the SLO, by arrival", xlabel="minutes", ylabel="requests/s")
    axes.set_ylim(bottom=0)


def _draw_hits(axes: Axes, outcomes: Sequence[Outcome], timelines: Sequence[MeasuredTimeline]) -> None:
    for outcome, line in zip(outcomes, timelines, strict=True):
        axes.plot(line.centre_s / 60, _smooth(line.token_hit_ratio) * 100, **_style(outcome))
    axes.set(title="Prompt tokens found in a cache or read", xlabel="minutes", ylabel="%")
    axes.set_ylim(bottom=0)


def _draw_imbalance(axes: Axes, outcomes: Sequence[Outcome], timelines: Sequence[MeasuredTimeline]) -> None:
    for outcome, line in zip(outcomes, timelines, strict=True):
        axes.plot(line.centre_s / 60, _smooth(line.imbalance), **_style(outcome))
    axes.set(title="Imbalance of prefill: busiest worker over the mean", xlabel="minutes", ylabel="ratio")
    axes.set_ylim(bottom=1)


def _style(outcome: Outcome) -> dict[str, Any]:
    is_ours = outcome.policy == "tandem"
    return {
        "label": outcome.policy,
        "color": _COLORS.get(outcome.policy, "black"),
        "linewidth": 2.4 if is_ours else 1.3,
        "zorder": 3 if is_ours else 2,
    }


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean of each point and its neighbours, without NaN."""
    half = _SMOOTH_WINDOWS // 2
    parts = [values[max(idx - half, 0) : idx + half + 1] for idx in range(len(values))]
    return np.array([np.mean(known) if len(known := part[~np.isnan(part)]) else math.nan for part in parts])


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"

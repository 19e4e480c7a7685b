"""The report of `tandem bench`: one curve for each number of requests at once. A curve of one point is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tandem.loadtest.client import StreamTiming
from tandem.loadtest.closed_loop import LoadRun
from tandem.loadtest.html_report import Draw, html_page, png_plots
from tandem.loadtest.stats import LoadSummary, summarize

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")  # Okabe and Ito's
_NUM_WINDOWS = 60  # in a timeline


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The measured streams of one run."""

    concurrency: int
    run: LoadRun

    @property
    def summary(self) -> LoadSummary:
        """Its statistics."""
        return summarize(self.run.timings, concurrency=self.concurrency, duration_s=self.run.duration_s)

    @property
    def good(self) -> list[StreamTiming]:
        """The streams without an error."""
        return [timing for timing in self.run.timings if not timing.error]

    @property
    def gaps_ms(self) -> list[float]:
        """The gaps between the events of each stream."""
        return [gap * 1e3 for timing in self.good for gap in timing.itl_s]


def bench_report(
    title: str,
    facts: Mapping[str, object],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    runs: Sequence[BenchRun],
) -> str:
    """The page. Raises `ConfigError` without matplotlib."""
    draw: dict[str, Draw] = {}
    if any(len(run.good) > 1 for run in runs):
        draw["Time to first token"] = lambda axes: _draw_ttft(axes, runs)
    if any(len(run.gaps_ms) > 1 for run in runs):
        draw["Inter-token latency"] = lambda axes: _draw_itl(axes, runs)
    if sum(run.summary.tpot_s.count > 0 for run in runs) > 1:
        draw["Throughput against latency"] = lambda axes: _draw_tradeoff(axes, runs)
    if any(sum(map(len, (timing.event_times_s for timing in run.good))) > 1 for run in runs):
        draw["Output over time"] = lambda axes: _draw_timeline(axes, runs)
    return html_page(title, facts, headings, rows, png_plots(draw))


def _draw_ttft(axes: Axes, runs: Sequence[BenchRun]) -> None:
    for idx, run in enumerate(runs):
        if values := sorted(timing.ttft_s * 1e3 for timing in run.good):
            shares = np.arange(1, len(values) + 1) / len(values) * 100
            axes.step(values, shares, where="post", **_style(idx, run))
            axes.set_xscale("log")
    axes.set(title="Time to first token", xlabel="ms", ylabel="% of requests, at most", ylim=(0, 102))


def _draw_itl(axes: Axes, runs: Sequence[BenchRun]) -> None:
    """The share of gaps longer than x: readers of a stream notice the tail."""
    for idx, run in enumerate(runs):
        gaps = np.sort(run.gaps_ms)
        if len(gaps):
            axes.plot(np.maximum(gaps, 1e-3), (1 - np.arange(len(gaps)) / len(gaps)) * 100, **_style(idx, run))
            axes.set(xscale="log", yscale="log")
    axes.set(title="Gaps between streamed events", xlabel="ms", ylabel="% of gaps, longer than")


def _draw_tradeoff(axes: Axes, runs: Sequence[BenchRun]) -> None:
    summaries = [summary for run in runs if (summary := run.summary).tpot_s.count]
    throughput = [summary.output_tokens_per_s for summary in summaries]
    for name, style, marker in (("p50", "-", "o"), ("p99", "--", "^")):
        values = [getattr(summary.tpot_s, name) * 1e3 for summary in summaries]
        axes.plot(throughput, values, style, marker=marker, color=_PALETTE[0], label=f"TPOT {name}")
    for summary, x in zip(summaries, throughput, strict=True):
        place = (x, summary.tpot_s.p50 * 1e3)
        axes.annotate(f"{summary.concurrency}", place, xytext=(5, -4), textcoords="offset points", va="top", fontsize=9)
    axes.set(
        title="Throughput and time per token", xlabel="output tokens/s (by each point: requests at once)", ylabel="ms"
    )
    # Room for the last point's marker and number. Numbers of points near the axis are below it.
    highest = max(summary.tpot_s.p99 for summary in summaries) * 1e3 or 1.0  # 0 if answers came as a whole
    axes.set(xlim=(0, 1.15 * max(throughput)), ylim=(-0.08 * highest, 1.08 * highest))


def _draw_timeline(axes: Axes, runs: Sequence[BenchRun]) -> None:
    for idx, run in enumerate(runs):
        tokens = [pair for timing in run.good for pair in zip(timing.event_times_s, timing.event_tokens, strict=True)]
        if not tokens:
            continue
        first_s = min(timing.started_s for timing in run.run.timings)
        times, weights = np.array([at - first_s for at, _ in tokens]), np.array([count for _, count in tokens])
        edges = np.linspace(0, max(times.max(), 1e-3), _NUM_WINDOWS + 1)
        counts, _ = np.histogram(times, bins=edges, weights=weights)
        axes.step(edges[:-1], counts / np.diff(edges), where="post", **_style(idx, run))
    axes.set(title="Output over time", xlabel="seconds", ylabel="tokens/s")
    axes.set_ylim(bottom=0)


def _style(idx: int, run: BenchRun) -> dict[str, Any]:
    return {"label": f"{run.concurrency} at once", "color": _PALETTE[idx % len(_PALETTE)], "linewidth": 1.6}

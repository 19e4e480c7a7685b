"""What tracing costs, and a picture of one request's trace.

Serve: two `tandem serve` run side by side, one with --tracing, and take turns with the same closed loop. Its figure is
output tokens per second. Route: the same with two `tandem route` in front of engines that compute nothing. Their
figures are CPU seconds of the router's process for an answer or a chunk, the worst that tracing can look like.
Every request is traced. The collector is a thread of this process.

    python -m benchmarks.tracing --picture docs/trace.svg
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import (
    ONE_PAIR_ALWAYS,
    Server,
    Setup,
    arguments,
    console,
    print_table,
    serving,
    write_result,
)
from benchmarks.edge import SHAPES, route_cpu_in_turn
from benchmarks.throughput import POOL, load
from tandem.loadtest.client import run_measured
from tests.support.collector import CollectedSpan, Collector, collecting
from tests.support.tracing import CLIENT_TRACE, TRACEPARENT

_NAMES = ("off", "on")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each pair of turns (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=8, help="of the closed loop (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=24, help="of each turn (default: %(default)s)")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--route-seconds", type=float, default=3.0, help="of each turn (default: %(default)s)")
    parser.add_argument("--picture", type=Path, help="SVG or PNG of one request's trace (extra report)")
    settings = parser.parse_args()
    if settings.quick:
        settings.rounds, settings.requests, settings.output_tokens, settings.route_seconds = 1, 8, 8, 0.3
    results: dict[str, Any] = {}
    with collecting() as collector:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        results["route"] = measure_route(settings)
        results["serve"] = measure_serve(settings, collector)
    _show(results, settings)
    write_result("tracing", settings, results)
    return 0


def measure_serve(settings: argparse.Namespace, collector: Collector) -> dict[str, list[float]]:
    """Output tokens per second of each turn, without and with tracing."""
    found: dict[str, list[float]] = {name: [] for name in _NAMES}
    with contextlib.ExitStack() as stack:
        servers = []
        for name, flags in zip(_NAMES, [(), ("--tracing",)], strict=True):
            setup = Setup(name, (*ONE_PAIR_ALWAYS.flags, POOL, *flags))
            servers.append(stack.enter_context(serving(setup, settings.model)))
        for number in range(-1, settings.rounds):  # the first round warms up
            for server in servers if number % 2 else reversed(servers):
                loaded = run_measured(load(server, settings, settings.streams, settings.requests, seed=number + 2))
                if number >= 0:
                    found[server.name].append(loaded["output_tokens_per_s"])
        if settings.picture is not None:
            draw(_one_trace(servers[1], collector), settings.picture)
    return found


def measure_route(settings: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """CPU seconds of the router for a chunk (plain: an answer) in each turn, by shape, without and with tracing."""
    flags: dict[str, list[str]] = dict(zip(_NAMES, [[], ["--tracing"]], strict=True))
    return route_cpu_in_turn(flags, SHAPES, settings.rounds, settings.route_seconds)


def _one_trace(server: Server, collector: Collector) -> list[CollectedSpan]:
    """The spans of one request on an idle server, with a prompt of several steps."""
    body = {"model": server.model, "prompt": "word " * 900, "max_tokens": 24, "temperature": 0}
    httpx.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": TRACEPARENT}, timeout=120)
    deadline = time.monotonic() + 30
    while not any(span.trace_id == CLIENT_TRACE for span in collector.named("POST /v1/completions")):
        if time.monotonic() > deadline:
            raise RuntimeError("the trace has not arrived")
        time.sleep(0.1)
    spans = [span for span in collector.spans if span.trace_id == CLIENT_TRACE]
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def draw(spans: list[CollectedSpan], path: Path) -> None:
    """One bar for each span, below the one that it is within; those within one are in order of their starts."""
    from matplotlib.figure import Figure

    by_id = {span.span_id: span for span in spans}

    def below(parent: CollectedSpan) -> Iterator[CollectedSpan]:
        yield parent
        for span in spans:
            if span.parent_id == parent.span_id:
                yield from below(span)

    def depth(span: CollectedSpan) -> int:
        parent = by_id.get(span.parent_id)
        return 0 if parent is None else 1 + depth(parent)

    zero_ns = spans[0].start_ns
    figure = Figure(figsize=(10, 0.42 * len(spans) + 1), layout="constrained")
    axes = figure.add_subplot()
    shades = ("#1b4965", "#2f7a9c", "#62a8c4", "#a9d0de")
    rows = list(below(spans[0]))
    for row, span in enumerate(rows):
        start_ms, length_ms = (span.start_ns - zero_ns) / 1e6, (span.end_ns - span.start_ns) / 1e6
        axes.barh(row, max(length_ms, 0.5), left=start_ms, color=shades[min(depth(span), 3)])
        axes.text(start_ms + length_ms + 3, row, f"{length_ms:.1f} ms", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), ["    " * depth(span) + span.name for span in rows], ha="left", fontsize=9)
    axes.tick_params("y", pad=150, length=0)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the request's first byte")
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path)
    console.print(f"written to {path}")


def _show(results: dict[str, Any], settings: argparse.Namespace) -> None:
    caption = f"medians of {settings.rounds} rounds in turn; noise = quartiles of the ratios"
    rows = [["serve, output tok/s", *_compared(*results["serve"].values())]]
    for name, turns in results["route"].items():
        rows.append([f"route, {name}, us", *_compared(*([value * 1e6 for value in turns[key]] for key in _NAMES))])
    print_table("Tracing of every request", ["", "off", "on", "ratio", "noise"], rows, caption)


def _compared(off: list[float], on: list[float]) -> list[float | str]:
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return [statistics.median(off), statistics.median(on), f"{statistics.median(ratios):.3f}", f"{low:.3f}-{high:.3f}"]


if __name__ == "__main__":
    sys.exit(main())

"""The pictures of a plan. They need the extra `report` (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tandem.loadtest.html_report import png_plots
from tandem.scheduling.planning.advice import size_text
from tandem.scheduling.planning.roofline import PlannedWorker
from tandem.simulator.plan import CONTEXTS, Memory, Prices, ShapePlan, contexts, cost_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which most colour-blind readers can tell apart.
_COLORS = {"prefill": "#D55E00", "transfer": "#7F7F7F", "host": "#0072B2", "disk": "#009E73", "object": "#CC79A7"}
_NAMES = {
    "prefill": "computed",
    "transfer": "handed over",
    "host": "host memory",
    "disk": "NVMe",
    "object": "object store",
}


def plan_plots(
    worker: PlannedWorker, memory: Memory, shapes: ShapePlan, output_tokens: float, prices: Prices, dpi: int = 170
) -> dict[str, bytes]:
    """PNG files by name. Raises `ConfigError` without matplotlib."""
    return png_plots(
        {
            "Compute or restore": lambda axes: draw_tiers(axes, worker),
            "Hits by size": lambda axes: draw_hits(axes, memory),
            "Shapes": lambda axes: draw_shapes(axes, shapes, worker, output_tokens, prices),
        },
        dpi,
    )


def draw_tiers(axes: Axes, worker: PlannedWorker) -> None:
    """Seconds to have a context's KV: computed, and from each tier, with the points from which loading is faster."""
    rows = contexts(worker)
    thousands = [one / 1000 for one in CONTEXTS]
    for name in ("prefill", *worker.tiers, "transfer"):
        seconds = [row[f"{name}_s"] for row in rows]
        style = "--" if name == "transfer" else "-"
        width = 2.4 if name == "prefill" else 1.5
        axes.plot(thousands, seconds, style, label=_NAMES.get(name, name), color=_COLORS.get(name), linewidth=width)
    for tier in worker.tiers:
        point = worker.break_even(tier)
        if point is not None and point >= CONTEXTS[0]:
            axes.plot([point / 1000], [worker.prefill_s(point)], "o", color=_COLORS.get(tier), markersize=7)
    axes.set(
        title="A context's KV: computed or restored", xscale="log", yscale="log",
        xlabel="thousand tokens of context", ylabel="seconds", xlim=(thousands[0], thousands[-1]),
    )  # fmt: skip


def draw_hits(axes: Axes, memory: Memory) -> None:
    """Share of prompt tokens found by the size of the cache; a dot at the size to have of each tier that pays."""
    sizes = [size / 1e9 for size in memory.num_bytes]
    axes.plot(sizes, [100 * hit for hit in memory.hits], color="black", linewidth=2.0)
    axes.plot(sizes[:1], [100 * memory.hits[0]], "s", color="black", label=f"pools {size_text(memory.num_bytes[0])}")
    for one in memory.advice:
        if one["gain"] > 0:
            place = list(memory.num_bytes).index(one["recommended_bytes"])
            label = f"{one['tier']} {size_text(one['recommended_bytes'])}"
            axes.plot(
                sizes[place], 100 * memory.hits[place], "o", color=_COLORS.get(one["tier"]), markersize=9, label=label
            )
    axes.set(title="Prompt tokens found, by size of the cache", xscale="log", xlabel="GB", ylabel="%")
    axes.set_ylim(0, max(5.0, 110 * max(memory.hits)))


def draw_shapes(axes: Axes, shapes: ShapePlan, worker: PlannedWorker, output_tokens: float, prices: Prices) -> None:
    """Output tokens per second and GPU within the SLO of each shape, with what they cost."""
    names = [str(one.shape) for one in shapes.served]
    costs = [cost_of(one, worker, output_tokens, prices) for one in shapes.served]
    colors = [_COLORS["prefill"] if not one.shape.num_prefill else _COLORS["host"] for one in shapes.served]
    bars = axes.bar(names, [cost["tokens_per_s_gpu"] for cost in costs], color=colors)
    labels = [_cost_text(cost) for cost in costs]
    axes.bar_label(bars, labels=labels, fontsize=8)
    axes.set(title="Served within the SLO", ylabel="output tokens/s per GPU")
    axes.margins(y=0.2)


def _cost_text(cost: Mapping[str, float]) -> str:
    if not cost["tokens_per_s_gpu"]:
        return "never"
    dollars = "" if math.isnan(cost["dollars_per_million"]) else f"${cost['dollars_per_million']:.2f}/M\n"
    joules = "" if math.isnan(cost["joules_per_token"]) else f"{cost['joules_per_token']:.1f} J"
    return f"{dollars}{joules}"

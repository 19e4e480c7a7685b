"""A report as one HTML file: facts, a table, and plots inside the file. Plots need the extra `report` (matplotlib)."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.protocol.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Draw = Callable[["Axes"], None]

# A phone shows a plot 9 cm wide: its letters are large for its size, and the legend takes no width.
_SIZE_INCHES = (5.4, 4.1)
_DPI = 170
_LEGEND_COLUMNS = 4


def check_plots() -> None:
    """Raise `ConfigError` if plots cannot be drawn: before a measurement, not after it."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as exc:
        raise ConfigError("a report needs matplotlib: pip install 'tandem-serve[report]'") from exc


def png_plots(draw: Mapping[str, Draw], dpi: int = _DPI) -> dict[str, bytes]:
    """PNG files by name, each drawn by its function. Raises `ConfigError` without matplotlib."""
    check_plots()
    return {name: _png(draw_on, dpi) for name, draw_on in draw.items()}


def html_page(
    title: str,
    facts: Mapping[str, object],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    plots: Mapping[str, bytes],
    *,
    bold_row: int | None = None,
) -> str:
    """A page with what was run, a table, and the plots. Texts are escaped here."""
    return _PAGE.format(
        title=html.escape(title),
        facts="".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(fact))}</dd>" for name, fact in facts.items()),
        headings="".join(f'<th scope="col">{html.escape(heading)}</th>' for heading in headings),
        names=_names(headings),
        rows="".join(_row(row, is_bold=idx == bold_row) for idx, row in enumerate(rows)),
        figures="\n".join(_figure(name, png) for name, png in plots.items()),
    )


def _png(draw_on: Draw, dpi: int) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=dpi, layout="constrained")
    draw_on(figure.add_subplot())
    _finish(figure)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _finish(figure: Figure) -> None:
    axes = figure.axes[0]
    axes.grid(True, which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.title.set(fontweight="bold", fontsize=11)
    axes.margins(x=0.01)
    if not _has_values(axes):  # ticks of a made-up scale would look like a measurement
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#666666")
        return
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            _label_log_ticks(axis)
    if names := axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center", ncols=min(len(names), _LEGEND_COLUMNS), frameon=False, fontsize=9)


def _label_log_ticks(axis: Axis) -> None:
    """Label powers of ten, and ticks between them where the axis has few powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_formatter("{x:g}")
    low, high = axis.get_view_interval()
    if high < 100 * low:
        axis.set_minor_locator(LogLocator(subs=(2, 5) if high > 5 * low else range(2, 10)))
        axis.set_minor_formatter("{x:g}")
    else:
        axis.set_minor_formatter(NullFormatter())


def _has_values(axes: Axes) -> bool:
    import numpy as np

    has_lines = any(np.isfinite(np.asarray(line.get_ydata(), float)).any() for line in axes.lines)
    return has_lines or bool(axes.patches or axes.collections)


def _figure(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{data}"></figure>'


def _row(cells: Sequence[str], *, is_bold: bool) -> str:
    kind = ' class="bold"' if is_bold else ""
    return f"<tr{kind}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"


def _names(headings: Sequence[str]) -> str:
    """Rules that put its heading before each cell. In CSS, a character may be written as its number."""
    quoted = ("".join(char if char.isalnum() else f"\\{ord(char):06x}" for char in heading) for heading in headings)
    return "\n".join(f'  td:nth-child({idx})::before {{ content: "{name}"; }}' for idx, name in enumerate(quoted, 1))


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
h1 {{ overflow-wrap: anywhere; }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1500px; margin: 2em auto; padding: 0 1em; }}
table {{ border-collapse: collapse; margin: 1.5em 0; }}
th, td {{ padding: .3em .9em; text-align: right; font-variant-numeric: tabular-nums; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ border-bottom: 2px solid #444; }}
tr.bold td {{ font-weight: 600; }}
td {{ border-bottom: 1px solid #ddd; }}
dl {{ display: grid; grid-template-columns: max-content auto; gap: .1em 1.2em; }}
dt {{ color: #666; }} dd {{ margin: 0; overflow-wrap: anywhere; }}
@media (max-width: 75em) {{
  table, tbody {{ display: block; }}
  thead {{ display: none; }}
  tr {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(10em, 1fr)); gap: 0 1.5em;
    padding: .6em 0; border-bottom: 2px solid #ddd; }}
  td {{ display: flex; justify-content: space-between; gap: 1em; padding: .1em 0; border: 0; overflow-wrap: anywhere; }}
  td:first-child {{ grid-column: 1 / -1; justify-content: flex-start; font-weight: 600; }}
  td::before {{ color: #666; font-weight: 400; }}
{names}
}}
.plots {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 460px), 1fr)); gap: 1em; }}
figure {{ margin: 0; }} img {{ width: 100%; max-width: 720px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<dl>{facts}</dl>
<table><thead><tr>{headings}</tr></thead><tbody>{rows}</tbody></table>
<div class="plots">
{figures}
</div>
</body>
</html>
"""

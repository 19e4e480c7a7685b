"""What `tandem top` draws: a snapshot of `/v1/dashboard` as tables for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

Json = dict[str, Any]

_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 12
_CURVE_WIDTH = 30
_NUM_ERRORS = 6
_GAP = 2  # between columns
_LEAST_MEMBERS = 3  # shown before anything that can be left out
_NUM_DECISIONS = 6
_LEAST_DECISIONS = 2
_LEAST_NAME, _LEAST_TEXT = 12, 7  # characters to which the first column and other texts are shortened
_STATE_STYLES = {"ready": "green", "draining": "yellow", "dead": "red", "lost": "red"}
# What `--sort` and the keys order the members by, largest first.
SORT_KEYS: dict[str, Callable[[Json], float]] = {
    "queue": lambda member: member["queue_s"] or 0.0,
    "running": lambda member: member["running"] or 0,
    "pool": lambda member: _share(member.get("used_blocks"), member.get("num_blocks")) or 0.0,
    "errors": lambda member: member.get("problems", member.get("failures")) or 0,
}


class _Column(NamedTuple):
    """One column of a table. If there is no room, texts are shortened; then the columns of the highest rank go."""

    heading: str
    cells: Sequence[Text]
    rank: int = 0  # 0 = it never goes
    is_text: bool = False


def render(snapshot: Json, *, url: str, sort: str, width: int, height: int, notice: str = "") -> RenderableType:
    """A screen of at most `height` lines of `width` characters. `notice` says why the snapshot is not live; "" = it is.

    If there is not enough room, what matters most comes first: traffic, pools and the worst workers.
    """
    members = _members(snapshot)
    is_own = snapshot["kind"] == "workers"
    head = [*_header(snapshot, url, notice), *_traffic(snapshot, width)[: max(height // 5, 1)]]
    pools = _pools(snapshot, width)
    num_left = height - len(head) - len(pools) - 1 - min(len(members), _LEAST_MEMBERS)
    tiers, decisions, move = [], [], []
    if snapshot.get("tiers") and 1 + len(snapshot["tiers"]) <= num_left:
        tiers = _tiers(snapshot, width)
    num_left -= len(tiers)
    num_decisions = min(_NUM_DECISIONS, len(snapshot["decisions"]["rows"]), num_left // 2 - 1)
    if num_decisions >= _LEAST_DECISIONS:
        decisions = _decisions(snapshot, num_decisions, width)
    num_left -= len(decisions)
    if num_left > 0:
        move = [
            *_shadow_line(snapshot),
            *_advice_lines(snapshot),
            *_autoscaler_lines(snapshot),
            *_error_line(snapshot),
        ][:num_left]
    num_left -= len(move)
    num_blanks = sum(map(bool, (pools, tiers, move, decisions))) + 1
    has_blanks = num_left >= num_blanks
    num_members = min(len(members), _LEAST_MEMBERS) + max(num_left - num_blanks * has_blanks, 0)
    shown = sorted(members, key=SORT_KEYS[sort], reverse=True)[:num_members] if len(members) > num_members else members
    table = _member_table(shown, len(members), sort, width, is_own=is_own)
    sections = [section for section in (head, pools, tiers, move, table, decisions) if section]
    lines = [line for section in sections for line in (*section, *([Text()] if has_blanks else []))]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines[:height])


def _members(snapshot: Json) -> list[Json]:
    """Workers or engines, as objects."""
    columns = snapshot["members"]["columns"]
    return [dict(zip(columns, row, strict=True)) for row in snapshot["members"]["rows"]]


def _header(snapshot: Json, url: str, notice: str) -> list[Text]:
    """One line, after a notice if the snapshot is not live: every screen must show that."""
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot["time"]))
    text = Text.assemble(("tandem ", "bold"), _clean(snapshot["version"]), f"  {clock}  ")
    text.append_text(_clean(", ".join(snapshot["models"])))
    text.append_text(_clean(f"  {url}", "dim"))
    text.no_wrap = True
    return [_clean(notice, "bold red"), text] if notice else [text]


def _traffic(snapshot: Json, width: int) -> list[Text]:
    """The traffic of the last minute, in as few lines as the width allows; what matters most comes first."""
    traffic, history = snapshot["traffic"], snapshot["history"]
    ttft_s, itl_s = (traffic.get(name) or [None] * 3 for name in ("ttft_s", "itl_s"))
    facts = [
        ("requests/s", _number(traffic.get("finished_per_s"), 2)),
        ("TTFT p50", _duration(ttft_s[0])),
        ("p99", _duration(ttft_s[2])),
        ("ITL p50", _duration(itl_s[0])),
        ("p99", _duration(itl_s[2])),
        ("hits", _percent(traffic.get("hit_ratio"))),
        ("waiting", _number(traffic["waiting"])),
        ("running", _number(traffic["running"])),
        ("refused/s", _number(traffic.get("refused_per_s"), 2)),
        ("failed/s", _number(traffic.get("failed_per_s"), 2)),
        ("tok/s out", _number(traffic.get("output_tokens_per_s"))),
    ]
    lines = [Text(no_wrap=True)]
    for name, value in facts:
        fact = Text.assemble((f"{name} ", "dim"), (value, "bold"))
        if lines[-1] and lines[-1].cell_len + 3 + fact.cell_len > width:
            lines.append(Text(no_wrap=True))
        lines[-1].append("   " if lines[-1] else "").append_text(fact)
    place = history["columns"].index("output_tokens_per_s")
    values = [row[place] or 0.0 for row in history["rows"]]
    scale = f"of {_number(max(values, default=0.0))}, last minute" if values else ""
    num_points = min(_CURVE_WIDTH, width - lines[-1].cell_len - len(scale) - 4)
    if num_points > 0 and values:
        lines[-1].append("   ").append(_curve(values[-num_points:]), style="cyan").append(f" {scale}", style="dim")
    return lines


def _pools(snapshot: Json, width: int) -> list[Text]:
    pools = snapshot["pools"].values()
    return _table(
        [
            _Column("pool", [_clean(role, "bold") for role in snapshot["pools"]], is_text=True),
            _Column("ready", [Text(f"{pool['num_ready']}/{pool['num_workers']}") for pool in pools]),
            _Column("prompts", [Text(_number(pool["prompts"])) for pool in pools], rank=2),
            _Column("queued tok", [Text(_number(pool["queued_tokens"])) for pool in pools], rank=3),
            _Column("queue", [Text(_duration(pool["queue_s"])) for pool in pools]),
            _Column(
                "running", [Text(f"{_number(pool['running'])}/{_number(pool['seats'])}") for pool in pools], rank=1
            ),
            _Column("wait for KV", [Text(_number(pool["for_room"])) for pool in pools], rank=4),
            _Column("sent/s", [Text(_number(pool.get("handoffs_per_s"), 2)) for pool in pools], rank=6),
            _Column("MB/s", [Text(_megabytes(pool.get("bytes_per_s"))) for pool in pools], rank=5),
        ],
        width,
    )


def _tiers(snapshot: Json, width: int) -> list[Text]:
    tiers = snapshot["tiers"]
    hits = {hit["source"]: hit["share"] for hit in snapshot["hits"]}
    shares = [_share(tier["num_blocks"], tier["capacity_blocks"]) for tier in tiers]
    return _table(
        [
            _Column("tier", [_clean(tier["name"], "bold") for tier in tiers], is_text=True),
            _Column("in use", [Text(_percent(share)) for share in shares]),
            _Column("", [_bar(share) for share in shares], rank=3),
            _Column("blocks", [Text(_number(tier["num_blocks"])) for tier in tiers], rank=1),
            _Column("of", [Text(_number(tier["capacity_blocks"])) for tier in tiers], rank=1),
            _Column("of prompt tokens", [Text(_percent(hits.get(tier["name"]))) for tier in tiers], rank=2),
        ],
        width,
    )


def _autoscaler_lines(snapshot: Json) -> Iterable[Text]:
    """The autoscaler's latest decision and the latest move of a worker, one line each."""
    if reason := snapshot["autoscaler"].get("reason"):
        yield Text("autoscaler  ", style="dim", no_wrap=True) + _clean(reason)
    if (advice := snapshot["autoscaler"].get("advice")) and advice not in reason:
        yield Text("would help too  ", style="dim", no_wrap=True) + _clean(advice)
    for move in snapshot["autoscaler"].get("moves", [])[:1]:
        words = _clean(f"{_move(move)}: {move['reason']}")
        yield Text("latest move  ", style="dim", no_wrap=True) + words


def _shadow_line(snapshot: Json) -> Iterable[Text]:
    """What a request would have lost by other routing strategies, the most expensive first."""
    costs = {name: one["mean_lost_s"] for name, one in snapshot["shadow"].items()}
    ranked = sorted(costs, key=costs.__getitem__, reverse=True)
    if shown := [f"{name} {_duration(costs[name])}" for name in ranked]:
        yield Text("a request would lose with  ", style="dim", no_wrap=True) + _clean(", ".join(shown))


def _advice_lines(snapshot: Json) -> Iterable[Text]:
    """Which sizes of the tiers would pay back, one line for each tier."""
    for words in snapshot.get("curve", {}).get("advice", []):
        yield Text("memory  ", style="dim", no_wrap=True) + _clean(words)


def _error_line(snapshot: Json) -> Iterable[Text]:
    """Answers with an error in the last minute by status, the most frequent first."""
    counts: Counter[str] = Counter()
    for row in snapshot["errors"]:
        counts[row["status"]] += round(row["recent"])
    if shown := [f"{status} x {number:,}" for status, number in counts.most_common(_NUM_ERRORS) if number]:
        yield Text("errors of the last minute  ", style="dim", no_wrap=True) + _clean(", ".join(shown))


def _move(move: Json) -> str:
    """What a worker did, in a few words."""
    worker = move["worker"]
    if move["kind"] == "flip":
        return f"{worker} from {move['from']} to {move['to']}"
    if move["kind"] == "add":
        return f"{worker} was not added, {move['withdrawn']}" if "withdrawn" in move else f"{worker} added"
    return f"{worker} restarted" if move["kind"] == "restart" else f"{worker} removed"


def _member_table(members: Sequence[Json], num_all: int, sort: str, width: int, *, is_own: bool) -> list[Text]:
    kind = "worker" if is_own else "engine"
    name = f"{kind}s" if len(members) == num_all else f"{len(members)} of {num_all} by {sort}"
    columns = [
        _Column(name, [_clean(one["name"], "bold") for one in members], is_text=True),
        _Column("role", [_clean(one["role"] or "") for one in members], rank=4, is_text=True),
        _Column(
            "state", [_clean(one["state"], _STATE_STYLES.get(one["state"], "")) for one in members], 1, is_text=True
        ),
        _Column("running", [_of(one["running"], one["seats"]) for one in members], rank=2),
        _Column("prompts", [Text(_number(one["prompts"])) for one in members], rank=5),
        _Column("queue", [Text(_duration(one["queue_s"])) for one in members]),
    ]
    if is_own:
        shares = [_share(one["used_blocks"], one["num_blocks"]) for one in members]
        columns += [
            _Column("pool", [Text(_percent(share)) for share in shares]),
            _Column("", [_bar(share) for share in shares], rank=6),
            _Column("errors", [Text(_number(one["problems"])) for one in members], rank=3),
            _Column("preempted", [Text(_number(one["preemptions"])) for one in members], rank=4),
        ]
    else:
        columns += [
            _Column("circuit", [_clean(str(one["circuit"])) for one in members], rank=3, is_text=True),
            _Column("failures", [Text(_number(one["failures"])) for one in members]),
        ]
    return _table(columns, width)


def _decisions(snapshot: Json, num_shown: int, width: int) -> list[Text]:
    rows = snapshot["decisions"]["rows"][:num_shown]
    chosen = [row["chosen"] or {} for row in rows]
    routes = [
        " > ".join(dict.fromkeys(name for name in (one.get("prefill"), one.get("decode")) if name)) for one in chosen
    ]
    return _table(
        [
            _Column("latest decisions", [_clean(route or "-") for route in routes], is_text=True),
            _Column("tenant", [_clean(row["tenant"]) for row in rows], rank=3, is_text=True),
            _Column("prompt", [Text(_number(row["num_prompt_tokens"])) for row in rows], rank=2),
            _Column("cached", [Text(_number(one.get("num_cached_tokens"))) for one in chosen], rank=5),
            _Column("TTFT predicted", [Text(_duration(row["predicted_ttft_s"])) for row in rows], rank=4),
            _Column("TTFT", [Text(_duration(row["actual_ttft_s"])) for row in rows]),
            _Column("outcome", [_clean(row["error"] or row["outcome"]) for row in rows], rank=1, is_text=True),
        ],
        width,
    )


def _table(columns: Sequence[_Column], width: int) -> list[Text]:
    """A heading and rows of one line each. Numbers are never cut: those that do not fit are left out."""
    kept = list(columns)
    while _least_width(kept) > width and (last := max(kept, key=lambda one: one.rank)).rank:
        kept.remove(last)
    num_spare = width - _least_width(kept)
    widths = []
    for place, column in enumerate(kept):
        least = _least_of(column, is_first=place == 0)
        more = max(min(_natural(column) - least, num_spare), 0)
        widths.append(least + more)
        num_spare -= more
    heads = [Text(column.heading, style="dim underline") for column in kept]
    rows = [heads, *zip_longest(*(column.cells for column in kept))]
    return [_line(row, kept, widths) for row in rows]


def _line(cells: Iterable[Text], columns: Iterable[_Column], widths: Iterable[int]) -> Text:
    line = Text(no_wrap=True)
    for cell, column, width in zip(cells, columns, widths, strict=True):
        shown = cell.copy()
        shown.truncate(width, overflow="ellipsis")
        blank = " " * (width - shown.cell_len)
        parts = (shown, blank) if column.is_text else (blank, shown)
        line.append(" " * _GAP if line else "")
        for part in parts:
            line.append(part)
    line.rstrip()
    return line


def _least_width(columns: Sequence[_Column]) -> int:
    leasts = (_least_of(column, is_first=place == 0) for place, column in enumerate(columns))
    return sum(leasts) + _GAP * (len(columns) - 1)


def _least_of(column: _Column, *, is_first: bool) -> int:
    natural = _natural(column)
    return min(natural, _LEAST_NAME if is_first else _LEAST_TEXT) if column.is_text else natural


def _natural(column: _Column) -> int:
    return max(len(column.heading), *(cell.cell_len for cell in column.cells), 0)


def _curve(values: Sequence[float]) -> str:
    """A line of block characters from zero to the highest value, the latest value at the right."""
    top = max(values, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1))] if top else _BARS[0] for value in values)


def _bar(share: float | None) -> Text:
    """A share as a bar; its figure is in the column before it."""
    if share is None:
        return Text("-")
    filled = round(min(max(share, 0.0), 1.0) * _BAR_WIDTH)
    style = "red" if share > 0.95 else "yellow" if share > 0.8 else "green"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR_WIDTH - filled), "dim"))


def _clean(text: str, style: str = "") -> Text:
    """Text that others wrote, as one line without markup and escape sequences, which would reach the terminal."""
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return Text(shown, style=style, no_wrap=True, overflow="ellipsis")


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _of(part: float | None, whole: float | None) -> Text:
    return Text(f"{_number(part)}/{_number(whole)}")


def _megabytes(num_bytes: float | None) -> str:
    return _number(None if num_bytes is None else num_bytes / 1e6, 1)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"

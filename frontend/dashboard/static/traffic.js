// The tiles at the top: a figure of the last minute, what stands behind it, and how it was over a range that can be chosen.

import { drawSparkline, sparkline } from "./charts.js";
import { byId, element, reconcile, setAttribute, setText } from "./dom.js";
import { count, duration, percent, plural, rate } from "./format.js";
import { authorization } from "./key.js";

const [P50, P90, P99] = [0, 1, 2];
const RANGES = [
  { name: "1 min", seconds: 60, step: 1 },
  { name: "15 min", seconds: 900, step: 15 },
  { name: "1 h", seconds: 3600, step: 15 },
];
const HISTORY_MS = 15000; // a new point comes in this time

let range = RANGES[0];
let shown = null; // the latest snapshot
let hour = { columns: [], rows: [] }; // longer ranges, as the server keeps them
let hourFetchedMs = -Infinity;

/** name, lines (their class: column of the history), the figure, its unit, a line of details, how values are written */
const TILES = [
  {
    name: "Requests",
    lines: { p50: "finished_per_s", failed: "failed_per_s" },
    format: rate,
    value: (t) => rate(t.finished_per_s),
    unit: "/s finished",
    detail: (t) => `${rate(t.refused_per_s)} refused, ${rate(t.failed_per_s)} failed /s`,
  },
  {
    name: "Output tokens",
    lines: { p50: "output_tokens_per_s" },
    format: rate,
    value: (t) => rate(t.output_tokens_per_s),
    unit: "/s",
    detail: (t) => `${rate(t.prompt_tokens_per_s)} prompt tokens /s`,
  },
  {
    name: "TTFT, first token",
    lines: { p99: "ttft_s_p99", p90: "ttft_s_p90", p50: "ttft_s_p50" },
    format: duration,
    value: (t) => duration(t.ttft_s?.[P50]),
    unit: "median",
    detail: (t) => `p90 ${duration(t.ttft_s?.[P90])}, p99 ${duration(t.ttft_s?.[P99])}`,
  },
  {
    name: "ITL, between tokens",
    lines: { p99: "itl_s_p99", p90: "itl_s_p90", p50: "itl_s_p50" },
    format: duration,
    value: (t) => duration(t.itl_s?.[P50]),
    unit: "median",
    detail: (t) => `p90 ${duration(t.itl_s?.[P90])}, p99 ${duration(t.itl_s?.[P99])}`,
  },
  {
    name: "Cache hits",
    lines: { p50: "hit_ratio" },
    format: percent,
    value: (t) => percent(t.hit_ratio),
    unit: "of prompt tokens",
    detail: (t) => (t.preemptions ? `${plural(t.preemptions, "preemption")} for lack of KV memory` : "no preemptions"),
  },
  {
    name: "Waiting",
    lines: { p50: "waiting" },
    format: count,
    value: (t) => count(t.waiting),
    unit: "in the router",
    detail: (t) => `${plural(t.running, "answer")} running`,
  },
];

export function showTraffic(snapshot) {
  shown = snapshot;
  if (!byId("ranges").firstChild) byId("ranges").append(...RANGES.map(rangeButton));
  const { columns, rows } = range.seconds > 60 ? hour : snapshot.history;
  reconcile(byId("traffic"), TILES, (tile) => tile.name, makeTile, (node, tile) => {
    setText(node.querySelector(".figure"), tile.value(snapshot.traffic));
    setText(node.querySelector(".muted"), tile.detail(snapshot.traffic));
    const lines = Object.entries(tile.lines).map(([name, column]) => {
      const place = columns.indexOf(column);
      return { name, points: place < 0 ? [] : rows.map((row) => [row[0], row[place]]) };
    });
    drawSparkline(node.querySelector(".sparkline"), lines, snapshot.time, range, tile.format);
  });
  if (range.seconds > 60) fetchHour();
}

function rangeButton(one) {
  const button = element("button", { type: "button", "aria-pressed": one === range }, one.name);
  button.addEventListener("click", () => {
    range = one;
    for (const other of byId("ranges").children) setAttribute(other, "aria-pressed", other === button);
    showTraffic(shown);
  });
  return button;
}

/** Get the longer history, if a new point may be there. */
async function fetchHour() {
  if (performance.now() - hourFetchedMs < HISTORY_MS) return;
  hourFetchedMs = performance.now();
  const response = await fetch("v1/dashboard/history", { headers: authorization(), cache: "no-store" }).catch(() => null);
  if (!response?.ok) return; // the stream says what is wrong
  hour = await response.json();
  showTraffic(shown);
}

function makeTile(tile) {
  const hasPercentiles = "p99" in tile.lines;
  return element(
    "li",
    { class: "panel tile" },
    element("h3", {}, tile.name),
    element("p", { class: "value" }, element("strong", { class: "figure" }), " ", element("span", {}, tile.unit)),
    element("p", { class: "muted" }),
    sparkline(),
    ...(hasPercentiles ? [element("p", { class: "hidden-text" }, "The chart has the median, p90 and p99.")] : []),
  );
}

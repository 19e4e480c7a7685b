// The tiles at the top: one figure each, what it was in the last minute, and what stands behind it.

import { drawSparkline, sparkline } from "./charts.js";
import { byId, element, reconcile, setText } from "./dom.js";
import { count, duration, percent, plural, rate } from "./format.js";

const [P50, P90, P99] = [0, 1, 2];

/** name, column of the history, the figure, its unit, and a line of details */
const TILES = [
  {
    name: "Requests",
    column: "finished_per_s",
    value: (t) => rate(t.finished_per_s),
    unit: "/s finished",
    detail: (t) => `${rate(t.refused_per_s)} refused, ${rate(t.failed_per_s)} failed /s`,
  },
  {
    name: "Output tokens",
    column: "output_tokens_per_s",
    value: (t) => rate(t.output_tokens_per_s),
    unit: "/s",
    detail: (t) => `${rate(t.prompt_tokens_per_s)} prompt tokens /s`,
  },
  {
    name: "TTFT, first token",
    column: "ttft_s",
    value: (t) => duration(t.ttft_s?.[P50]),
    unit: "median",
    detail: (t) => `p90 ${duration(t.ttft_s?.[P90])}, p99 ${duration(t.ttft_s?.[P99])}`,
  },
  {
    name: "ITL, between tokens",
    column: "itl_s",
    value: (t) => duration(t.itl_s?.[P50]),
    unit: "median",
    detail: (t) => `p90 ${duration(t.itl_s?.[P90])}, p99 ${duration(t.itl_s?.[P99])}`,
  },
  {
    name: "Cache hits",
    column: "hit_ratio",
    value: (t) => percent(t.hit_ratio),
    unit: "of prompt tokens",
    detail: () => "not computed again",
  },
  {
    name: "Waiting",
    column: "waiting",
    value: (t) => count(t.waiting),
    unit: "in the router",
    detail: (t) => `${plural(t.running, "answer")} running`,
  },
];

export function showTraffic(snapshot) {
  const { columns, rows } = snapshot.history;
  reconcile(byId("traffic"), TILES, (tile) => tile.name, makeTile, (node, tile) => {
    setText(node.querySelector(".figure"), tile.value(snapshot.traffic));
    setText(node.querySelector(".muted"), tile.detail(snapshot.traffic));
    const column = columns.indexOf(tile.column);
    const points = rows.map((row) => [row[0], row[column]]);
    drawSparkline(node.querySelector("svg"), points, snapshot.time, 60);
  });
}

function makeTile(tile) {
  return element(
    "li",
    { class: "panel tile" },
    element("h3", {}, tile.name),
    element("p", { class: "value" }, element("strong", { class: "figure" }), " ", element("span", {}, tile.unit)),
    element("p", { class: "muted" }),
    sparkline(),
  );
}

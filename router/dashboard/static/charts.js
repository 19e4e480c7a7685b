// Small charts in SVG and in boxes. Each has a text beside it that says the same.

import { element, reconcile, setAttribute, setText, setWidth, svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 32;
const LONGEST_STEP_S = 4; // between two points that a line joins; they come once a second

/** A line without axes. `points` are pairs of a Unix time and a value; null = not known. It has a gap where nobody looked. */
export function drawSparkline(chart, points, now, spanSeconds) {
  const known = points.filter(([, value]) => value !== null);
  const highest = Math.max(...known.map(([, value]) => value), 1e-9);
  const x = (time) => WIDTH - 4 - ((now - time) / spanSeconds) * (WIDTH - 8);
  const y = (value) => HEIGHT - 4 - (value / highest) * (HEIGHT - 8);
  const follows = (place) => place > 0 && known[place][0] - known[place - 1][0] < LONGEST_STEP_S;
  const path = known.map(([time, value], place) => `${follows(place) ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
  if (!chart.firstChild) {
    chart.append(svg("path", { class: "line" }), svg("path", { class: "end" }));
  }
  const [line, end] = chart.children;
  setAttribute(line, "d", path.join(""));
  const last = known.at(-1);
  setAttribute(end, "visibility", last ? "visible" : "hidden");
  if (last) setAttribute(end, "d", `M${x(last[0]).toFixed(1)} ${y(last[1]).toFixed(1)}h0`);
}

export function sparkline() {
  return svg("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
}

/** Parts of a bar, one after another. `parts` have a name, which is their class, and a share of the whole width. */
export function drawStack(bar, parts) {
  reconcile(
    bar,
    parts.filter((part) => part.share > 0),
    (part) => part.name,
    (part) => element("span", { class: `part ${part.name}` }),
    (child, part) => setWidth(child, part.share),
  );
}

/** A row with a name, a bar and a text: a share of something. */
export function barRow(name) {
  return element(
    "li",
    {},
    element("span", { class: "name" }, name),
    element("span", { class: "bar", "aria-hidden": "true" }, element("span", { class: "part" })),
    element("span", { class: "value" }),
  );
}

export function updateBarRow(row, share, text) {
  setWidth(row.querySelector(".part"), share ?? 0);
  setText(row.querySelector(".value"), text);
}

// Small charts in SVG and in boxes. Each has a text beside it that says the same.

import { element, reconcile, setAttribute, setText, setWidth, svg } from "./dom.js";

const WIDTH = 120;
const HEIGHT = 40;
const LONGEST_GAP = 4; // steps between two points that a line joins

/**
 * Lines from zero to the highest value, which the chart names, over `range.seconds` up to now. Each line has a `name`,
 * which is its class, and `points`: pairs of a Unix time and a value; null = not known. A line has a gap where points lack.
 */
export function drawSparkline(chart, lines, now, range, format) {
  const known = lines.map((line) => line.points.filter(([, value]) => value !== null));
  const highest = Math.max(...known.flat().map(([, value]) => value), 0);
  const x = (time) => WIDTH - 3 - ((now - time) / range.seconds) * (WIDTH - 3);
  const y = (value) => HEIGHT - 2 - (value / (highest || 1)) * (HEIGHT - 5);
  setText(chart.querySelector(".highest"), known.flat().length ? format(highest) : "");
  setText(chart.querySelector(".from"), `−${range.name}`);
  reconcile(chart.querySelector("svg"), lines, (line) => line.name, makeLine, (node, line) => {
    const points = known[lines.indexOf(line)];
    const follows = (place) => place > 0 && points[place][0] - points[place - 1][0] < LONGEST_GAP * range.step;
    const path = points.map(([time, value], place) => `${follows(place) ? "L" : "M"}${x(time).toFixed(1)} ${y(value).toFixed(1)}`);
    const last = points.at(-1);
    setAttribute(node.firstChild, "d", path.join(""));
    setAttribute(node.lastChild, "d", last ? `M${x(last[0]).toFixed(1)} ${y(last[1]).toFixed(1)}h0` : "");
  });
}

function makeLine(line) {
  return svg("g", { class: line.name }, svg("path", { class: "line" }), svg("path", { class: "end" }));
}

export function sparkline() {
  return element(
    "div",
    { class: "sparkline", "aria-hidden": "true" },
    element("span", { class: "highest" }),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" }),
    element("span", { class: "from" }),
    element("span", { class: "to" }, "now"),
  );
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

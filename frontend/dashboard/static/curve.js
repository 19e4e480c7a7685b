// The miss-ratio curve: size of a cache on a logarithmic axis, share of prompt tokens that it would miss upwards.

import { setText, svg } from "./dom.js";
import { bytes, percent } from "./format.js";

const HEIGHT = 218; // without the names of the levels
const MARGIN = { right: 16, bottom: 28, left: 44 };
const ROW = 13; // height of a row of names
const CHAR = 6.8; // about the width of a character
const NAMES = { pool: "pool", host: "host", disk: "NVMe", object: "object store" };

/** Draw it in the width that there is; null = there was no traffic yet. */
export function drawCurve(node, curve) {
  const width = Math.max(node.clientWidth, 240);
  const shown = JSON.stringify([width, curve]);
  if (node.shown === shown) return;
  node.shown = shown;
  if (!curve) return setText(node, "No prompts yet.");
  const low = Math.log2(curve.points[0][0]);
  const high = Math.log2(curve.points.at(-1)[0]);
  const x = (size) => MARGIN.left + ((Math.log2(size) - low) / (high - low)) * (width - MARGIN.left - MARGIN.right);
  const levels = [...curve.levels].sort((one, other) => one.num_bytes - other.num_bytes);
  const names = placeNames(levels, x, width);
  const top = ROW * (1 + Math.max(0, ...names.map(({ row }) => row)));
  const height = HEIGHT + top;
  const bottom = height - MARGIN.bottom;
  const y = (misses) => top + 8 + (1 - misses) * (bottom - top - 8);
  const line = curve.points.map(([size, hits], place) => `${place ? "L" : "M"}${x(size).toFixed(1)} ${y(1 - hits).toFixed(1)}`);
  const label = curve.levels.map((level) => `${NAMES[level.name] ?? level.name} misses ${percent(1 - level.hit_ratio)}`);
  node.replaceChildren(
    svg(
      "svg",
      { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Miss-ratio curve: ${label.join(", ")}` },
      ...verticalAxis(y, width),
      ...horizontalAxis(curve.points, x, width, height),
      svg("path", { class: "line", d: line.join("") }),
      ...levels.flatMap((level, place) => marker(level, names[place], x, y, bottom)),
    ),
  );
}

function verticalAxis(y, width) {
  return [0, 0.25, 0.5, 0.75, 1].flatMap((misses) => [
    svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(misses), y2: y(misses) }),
    svg("text", { x: MARGIN.left - 8, y: y(misses) + 4, "text-anchor": "end" }, percent(misses)),
  ]);
}

function horizontalAxis(points, x, width, height) {
  const sizes = [];
  for (let size = 10 ** Math.ceil(Math.log10(points[0][0])); size <= points.at(-1)[0]; size *= 10) sizes.push(size);
  return sizes
    .filter((size) => x(size) < width - 24)
    .map((size) => svg("text", { x: x(size), y: height - 8, "text-anchor": "middle" }, bytes(size)));
}

/** Where the name of each level is written: about its line, in the first row in which it overlaps no other name. */
function placeNames(levels, x, width) {
  const ends = []; // of the latest name of each row
  return levels.map((level) => {
    const name = NAMES[level.name] ?? level.name;
    const length = CHAR * name.length;
    const left = Math.max(Math.min(x(level.num_bytes) - length / 2, width - length - 2), 0);
    const free = ends.findIndex((end) => end + CHAR < left);
    const row = free < 0 ? ends.length : free;
    ends[row] = left + length;
    return { name, left, length, row };
  });
}

/** A full dot where a level is now, and an empty one where twice its size would be. */
function marker(level, { name, left, length, row }, x, y, bottom) {
  const [now, twice] = [x(level.num_bytes), x(2 * level.num_bytes)];
  const base = ROW * (row + 1) - 2;
  return [
    svg("line", { class: "level", x1: now, x2: now, y1: base + 3, y2: bottom }),
    svg("circle", { class: "now", cx: now, cy: y(1 - level.hit_ratio), r: 5 }),
    svg("circle", { class: "twice", cx: twice, cy: y(1 - level.twice_hit_ratio), r: 4.5 }),
    svg("text", { class: "name", x: left + length / 2, y: base, "text-anchor": "middle" }, name),
  ];
}

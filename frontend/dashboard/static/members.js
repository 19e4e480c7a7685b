// All workers or engines: a map that shows hundreds at a glance, and a table to sort and filter.

import { byId, element, reconcile, setAttribute, setText, setWidth, svg } from "./dom.js";
import { count, duration, percent, plural } from "./format.js";

const CELL = 18;
const LEAST_FOR_MAP = 9; // fewer are seen at a glance in the table

/** title, text of a cell, what to sort by, classes; `share` draws a bar */
const SHARED = [
  { title: "Role", value: (m) => m.role, text: (m) => m.role, role: true },
  { title: "State", value: (m) => m.state, text: (m) => m.state },
  { title: "Running", number: true, minor: true, value: (m) => m.running, text: (m) => (m.seats ? `${count(m.running)} / ${count(m.seats)}` : count(m.running)) },
  { title: "Prompts", number: true, value: (m) => m.prompts, text: (m) => count(m.prompts), extra: true },
  { title: "Queue", number: true, value: (m) => m.queue_s, text: (m) => duration(m.queue_s) },
];
const WORKERS = [
  ...SHARED,
  { title: "Pool", number: true, value: poolShare, text: (m) => percent(poolShare(m)), share: poolShare },
  { title: "Tiers", value: (m) => m.tiers.length, text: tiersOf, extra: true },
  { title: "Wait for KV memory", number: true, value: (m) => m.for_room, text: (m) => count(m.for_room), extra: true },
  { title: "Preempted", number: true, value: (m) => m.preemptions, text: (m) => count(m.preemptions), extra: true },
  { title: "Errors", number: true, value: (m) => m.problems, text: (m) => count(m.problems) },
  { title: "Hardware", value: (m) => m.kind, text: (m) => m.kind, extra: true },
];
const ENGINES = [
  ...SHARED,
  { title: "Circuit", value: (m) => m.circuit, text: (m) => m.circuit.replace("_", " ") },
  { title: "Others' requests", number: true, value: (m) => m.foreign, text: (m) => count(m.foreign), extra: true },
  { title: "Requests", number: true, value: (m) => m.requests, text: (m) => count(m.requests), extra: true },
  { title: "Failures", number: true, value: (m) => m.failures, text: (m) => count(m.failures) },
  { title: "Model", value: (m) => m.model, text: (m) => m.model, extra: true },
  { title: "Gets no requests because", value: (m) => m.refusal, text: (m) => m.refusal || "–" },
];

let sorting = { column: null, descending: false }; // null = the server's order
let members = [];
let columns = null;

export function showMembers(snapshot) {
  const { columns: names, rows } = snapshot.members;
  members = rows.map((row) => Object.fromEntries(names.map((name, place) => [name, row[place]])));
  const isOwn = snapshot.kind === "workers";
  setText(byId("members-title"), isOwn ? "Workers" : "Engines");
  const wanted = isOwn ? WORKERS : ENGINES;
  if (columns !== wanted) makeHead((columns = wanted));
  drawMap(isOwn);
  showRows();
}

function showRows() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const matches = (member) => {
    const text = `${member.name} ${columns.map((column) => column.text(member)).join(" ")}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
  const found = members.filter(matches);
  if (sorting.column) found.sort(compare);
  reconcile(byId("members").tBodies[0], found, (member) => member.name, makeRow, updateRow);
  const noun = plural(members.length, byId("members-title").textContent.slice(0, -1).toLowerCase());
  setText(byId("members-count"), found.length === members.length ? noun : `${count(found.length)} of ${noun}`);
}

function compare(one, other) {
  const [left, right] = [one, other].map((member) => sorting.column.value(member) ?? -1);
  const order = typeof left === "string" ? left.localeCompare(right, "en", { numeric: true }) : left - right;
  return sorting.descending ? -order : order;
}

const NAME = { title: "Name", value: (m) => m.name, text: (m) => m.name };

function makeHead() {
  const table = byId("members");
  const heads = [NAME, ...columns].map((column) => {
    const button = element("button", { type: "button", class: "sort" }, column.title);
    button.addEventListener("click", () => sortBy(column));
    return element("th", { scope: "col", class: classesOf(column) }, button);
  });
  table.replaceChildren(element("thead", {}, element("tr", {}, ...heads)), element("tbody"));
}

function sortBy(column) {
  const isSame = sorting.column === column;
  sorting = { column, descending: isSame ? !sorting.descending : Boolean(column.number) };
  [...byId("members").tHead.rows[0].cells].forEach((cell, place) => {
    const isSorted = [NAME, ...columns][place] === column;
    setAttribute(cell, "aria-sort", isSorted ? (sorting.descending ? "descending" : "ascending") : null);
  });
  showRows();
}

function makeRow(member) {
  const cells = columns.map((column) => {
    const cell = element("td", { class: classesOf(column) });
    if (column.role) cell.append(element("span", { class: "role" }));
    cell.append(element("span", { class: "value" }));
    if (column.share) cell.append(element("span", { class: "bar thin", "aria-hidden": "true" }, element("span", { class: "part" })));
    return cell;
  });
  return element("tr", {}, element("th", { scope: "row" }, member.name), ...cells);
}

function updateRow(row, member) {
  columns.forEach((column, place) => {
    const cell = row.cells[place + 1];
    setText(cell.querySelector(".value"), column.text(member));
    if (column.share) setWidth(cell.querySelector(".part"), column.share(member) ?? 0);
    if (column.role) setAttribute(cell.querySelector(".role"), "class", `role ${member.role}`);
  });
  setAttribute(row, "data-state", member.circuit === "open" ? "open" : member.state);
}

/** A square for each prefill worker, a circle for each other one, filled as far as its pool is in use. */
function drawMap(isOwn) {
  const map = byId("map");
  map.hidden = members.length < LEAST_FOR_MAP;
  if (map.hidden) return;
  if (!map.firstChild) map.append(svg("svg", { role: "img" }), element("p", { class: "muted" }));
  const [chart, note] = map.children;
  const perRow = Math.max(Math.floor(map.clientWidth / CELL), 1);
  const height = Math.ceil(members.length / perRow) * CELL;
  setAttribute(chart, "width", perRow * CELL);
  setAttribute(chart, "height", height);
  const busy = members.filter((member) => shareOf(member) > 0.9).length;
  const notReady = members.filter((member) => member.state !== "ready").length;
  const text = `${count(busy)} of ${count(members.length)} more than 90% full, ${count(notReady)} not ready`;
  setAttribute(chart, "aria-label", text);
  const ordered = members.map((member, place) => ({ member, place })).sort((one, other) => order(one.member) - order(other.member) || one.place - other.place);
  reconcile(chart, ordered.map(({ member }, place) => ({ member, place })), ({ member }) => member.name, makeCell, (cell, { member, place }) =>
    updateCell(cell, member, (place % perRow) * CELL, Math.floor(place / perRow) * CELL),
  );
  setText(note, `${text}. Squares prefill, circles decode; filled as far as ${isOwn ? "the pool is in use" : "seats are taken"}.`);
}

function makeCell({ member }) {
  return svg("g", {}, svg("title"), svg("rect", { class: "outline", width: 13, height: 13 }), svg("rect", { class: "fill", width: 13 }), svg("path", { class: "cross", d: "M3 3 L10 10 M10 3 L3 10" }));
}

function updateCell(cell, member, x, y) {
  const [title, outline, fill] = cell.children;
  const share = Math.min(Math.max(shareOf(member), 0), 1);
  const filled = Math.round(13 * share);
  setAttribute(cell, "transform", `translate(${x + 2} ${y + 2})`);
  setAttribute(cell, "class", `cell ${member.role} ${member.state === "ready" ? "" : "down"}`);
  setAttribute(outline, "rx", member.role === "prefill" ? 2 : 6.5);
  setAttribute(fill, "rx", member.role === "prefill" ? 2 : Math.min(6.5, filled / 2));
  setAttribute(fill, "y", 13 - filled);
  setAttribute(fill, "height", filled);
  setText(title, `${member.name}: ${member.state}, ${percent(share)} full`);
}

function order(member) {
  return member.role === "prefill" ? 0 : 1;
}

function shareOf(member) {
  return poolShare(member) ?? (member.seats ? member.running / member.seats : 0);
}

function poolShare(member) {
  return member.used_blocks === null || !member.num_blocks ? null : member.used_blocks / member.num_blocks;
}

function tiersOf(member) {
  const used = (tier) => (tier[2] ? percent(tier[1] / tier[2]) : `${count(tier[1])} blocks`);
  return (member.tiers ?? []).map((tier) => `${tier[0]} ${used(tier)}`).join(", ") || "–";
}

function classesOf(column) {
  return ["number", "extra", "minor", "share"].filter((name) => column[name]).join(" ");
}

byId("filter").addEventListener("input", () => columns && showRows());

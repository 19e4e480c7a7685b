// Answers with an error, by status and route.

import { byId, element, reconcile, setText } from "./dom.js";
import { count } from "./format.js";

const HEAD = ["Status", "Route", "Last minute", "All"];
const MEANINGS = {
  400: "wrong request",
  401: "no valid key",
  403: "not allowed",
  404: "not found",
  405: "wrong method",
  408: "request came too slowly",
  413: "body too large",
  415: "body is no JSON",
  422: "given up",
  429: "too many requests",
  431: "header too large",
  499: "client left",
  500: "error of the server",
  501: "not served",
  502: "worker failed",
  503: "no worker could take it",
  504: "took too long",
};

export function showErrors({ errors }) {
  const table = byId("errors");
  if (!table.tHead) {
    const head = HEAD.map((text, place) => element("th", { scope: "col", class: place > 1 ? "number" : "" }, text));
    table.append(element("thead", {}, element("tr", {}, ...head)), element("tbody"));
  }
  table.hidden = errors.length === 0;
  byId("no-errors").hidden = errors.length > 0;
  reconcile(table.tBodies[0], errors, (row) => `${row.status} ${row.route}`, makeRow, updateRow);
}

function makeRow(row) {
  const meaning = MEANINGS[row.status] ? ` ${MEANINGS[row.status]}` : "";
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, row.status, element("span", { class: "muted" }, meaning)),
    element("td", {}, row.route),
    element("td", { class: "number" }),
    element("td", { class: "number" }),
  );
}

function updateRow(node, row) {
  setText(node.cells[2], count(row.recent));
  setText(node.cells[3], count(row.all));
}

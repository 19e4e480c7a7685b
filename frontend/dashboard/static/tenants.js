// Tenants: how much of the traffic each has, what of it waits, and what was refused.

import { byId, element, reconcile, setText, setWidth } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";

const HEAD = ["Tenant", "Share", "Admitted /s", "Waiting", "Mean wait", "Refused"];
const EXTRA = ["Admitted /s", "Mean wait"]; // not on a phone

export function showTenants(snapshot) {
  const table = byId("tenants");
  if (!table.tHead) {
    const head = HEAD.map((text, place) => element("th", { scope: "col", class: classesOf(text, place) }, text));
    table.append(element("thead", {}, element("tr", {}, ...head)), element("tbody"));
  }
  reconcile(table.tBodies[0], snapshot.tenants, (tenant) => tenant.name, makeRow, updateRow);
}

function makeRow() {
  const share = element("td", { class: "number share" }, element("span", { class: "value" }), shareBar());
  const cells = HEAD.slice(2).map((text) => element("td", { class: classesOf(text, 2) }));
  return element("tr", {}, element("th", { scope: "row" }), share, ...cells);
}

function classesOf(text, place) {
  return `${place ? "number" : ""}${EXTRA.includes(text) ? " minor" : ""}`;
}

function shareBar() {
  return element("span", { class: "bar thin", "aria-hidden": "true" }, element("span", { class: "part" }));
}

function updateRow(row, tenant) {
  const [name, share, admitted, waiting, wait, refused] = row.cells;
  setText(name, tenant.weight === null || tenant.weight === 1 ? tenant.name : `${tenant.name} (weight ${tenant.weight})`);
  setText(share.querySelector(".value"), percent(tenant.share));
  setWidth(share.querySelector(".part"), tenant.share ?? 0);
  setText(admitted, rate(tenant.admitted_per_s));
  setText(waiting, count(tenant.num_waiting));
  setText(wait, duration(tenant.mean_wait_s));
  setText(refused, refusalsOf(tenant.refused));
}

function refusalsOf(refused) {
  const reasons = Object.entries(refused).sort(([, one], [, other]) => other - one);
  return reasons.map(([reason, number]) => `${count(number)} ${reason}`).join(", ") || "none";
}

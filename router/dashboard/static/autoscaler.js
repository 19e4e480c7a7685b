// What the autoscaler sees, what it decided last, and the latest changes of roles with their reasons.

import { barRow, updateBarRow } from "./charts.js";
import { byId, element, reconcile, setText } from "./dom.js";
import { seconds, timeOfDay } from "./format.js";

export function showAutoscaler(snapshot) {
  const { autoscaler, pools } = snapshot;
  const hasRoles = "prefill" in pools && "decode" in pools;
  byId("autoscaler-panel").hidden = snapshot.kind === "engines" && autoscaler.flips.length === 0;
  const node = byId("autoscaler");
  if (!node.firstChild) {
    node.append(
      element("p", { class: "reason" }),
      element("ul", { class: "bars" }),
      element("h3", {}, "Latest role changes"),
      element("ol", { class: "moves" }),
    );
  }
  const [reason, waits, , moves] = node.children;
  const advice = autoscaler.advice ? `. It advises to ${autoscaler.advice}.` : "";
  setText(reason, autoscaler.reason ? autoscaler.reason + advice : hasRoles ? "Off: roles change only on an operator's word." : "There are no roles to change.");
  showWaits(waits, autoscaler);
  reconcile(moves, autoscaler.flips, (move) => `${move.began} ${move.worker}`, makeMove, updateMove);
  moves.hidden = autoscaler.flips.length === 0;
  moves.previousElementSibling.hidden = moves.hidden;
}

function showWaits(list, autoscaler) {
  const waits = ["prefill", "decode"].filter((role) => typeof autoscaler[`${role}_wait_s`] === "number");
  const longest = Math.max(...waits.map((role) => autoscaler[`${role}_wait_s`]), 1);
  reconcile(
    list,
    waits,
    (role) => role,
    (role) => {
      const row = barRow(`${role} waits`);
      row.querySelector(".part").classList.add(role);
      return row;
    },
    (row, role) => updateBarRow(row, autoscaler[`${role}_wait_s`] / longest, seconds(autoscaler[`${role}_wait_s`])),
  );
}

function makeMove(move) {
  return element(
    "li",
    {},
    element("p", {}, element("time", {}, timeOfDay(move.began)), " ", element("strong", { class: "move" })),
    element("p", { class: "muted" }, move.reason),
    element("p", { class: "outcome muted" }),
  );
}

function updateMove(node, move) {
  setText(node.querySelector(".move"), `${move.worker}: ${move.from} → ${move.to}`);
  const outcome = node.querySelector(".outcome");
  setText(outcome, outcomeOf(move));
  outcome.classList.toggle("error", "failed" in move);
}

function outcomeOf(move) {
  if ("failed" in move) return `Failed: ${move.failed}`;
  if (!("serving_after_s" in move)) return "Under way";
  const serving = `Served in its new role after ${seconds(move.serving_after_s)}`;
  if ("not_drained" in move) return `${serving}; its old work did not end: ${move.not_drained}`;
  return "drained_after_s" in move ? `${serving}, old work done after ${seconds(move.drained_after_s)}` : serving;
}

// What the autoscaler sees, what it decided last, and the latest moves of workers with their reasons.

import { barRow, updateBarRow } from "./charts.js";
import { byId, element, reconcile, setText } from "./dom.js";
import { seconds, timeOfDay } from "./format.js";

export function showAutoscaler(snapshot) {
  const { autoscaler, pools } = snapshot;
  const hasRoles = "prefill" in pools && "decode" in pools;
  byId("autoscaler-panel").hidden = snapshot.kind === "engines" && autoscaler.moves.length === 0;
  const node = byId("autoscaler");
  if (!node.firstChild) {
    node.append(
      element("p", { class: "reason" }),
      element("ul", { class: "bars" }),
      element("h3", {}, "Latest moves"),
      element("ol", { class: "moves" }),
    );
  }
  const [reason, waits, , moves] = node.children;
  setText(reason, autoscaler.reason ? sentence(autoscaler.reason) + adviceOf(autoscaler) : hasRoles ? "Off: roles change only on an operator's word." : "There are no roles to change.");
  showWaits(waits, autoscaler);
  reconcile(moves, autoscaler.moves, (move) => `${move.kind} ${move.began} ${move.worker}`, makeMove, updateMove);
  moves.hidden = autoscaler.moves.length === 0;
  moves.previousElementSibling.hidden = moves.hidden;
}

/** A move that would help too and is not the autoscaler's to make, unless the sentence names it. */
function adviceOf({ reason, advice }) {
  return advice && !reason.includes(advice) ? ` It would help too to ${advice}.` : "";
}

function sentence(text) {
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
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
  setText(node.querySelector(".move"), `${move.worker}: ${whatHappens(move)}`);
  const outcome = node.querySelector(".outcome");
  setText(outcome, outcomeOf(move));
  outcome.classList.toggle("error", "failed" in move || "withdrawn" in move);
}

function whatHappens(move) {
  return { flip: `${move.from} → ${move.to}`, add: `added as ${move.role}`, remove: "removed", restart: "restarted" }[move.kind];
}

function outcomeOf(move) {
  if (move.kind === "add") return outcomeOfAdding(move);
  return move.kind === "flip" ? outcomeOfFlip(move) : outcomeOfLeaving(move);
}

function outcomeOfAdding(move) {
  if ("withdrawn" in move) return `Withdrawn: ${move.withdrawn}`;
  return "serving_after_s" in move ? `Served after ${seconds(move.serving_after_s)}` : "Under way";
}

function outcomeOfLeaving(move) {
  if (!("left_after_s" in move)) return "Under way";
  const forced = move.finished ? "" : "; what was left of its work went on elsewhere or ended";
  const back = "back_after_s" in move ? `, back after ${seconds(move.back_after_s)}` : "";
  return `Left after ${seconds(move.left_after_s)}${back}${forced}`;
}

function outcomeOfFlip(move) {
  if ("failed" in move) return `Failed: ${move.failed}`;
  if (!("serving_after_s" in move)) return "Under way";
  const serving = `Served in its new role after ${seconds(move.serving_after_s)}`;
  if ("not_drained" in move) return `${serving}; its old work did not end: ${move.not_drained}`;
  return "drained_after_s" in move ? `${serving}, old work done after ${seconds(move.drained_after_s)}` : serving;
}

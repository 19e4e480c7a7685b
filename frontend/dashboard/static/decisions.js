// The latest decisions: what the chosen way was predicted to cost, term by term, and what the best alternative would.

import { drawStack } from "./charts.js";
import { byId, element, reconcile, setAttribute, setText } from "./dom.js";
import { ago, count, duration, seconds } from "./format.js";

const LEAST_S = 0.0005; // shorter terms are not worth a word

/** A term's name, and what it means. */
const TERMS = {
  queue: ["queue", "waiting for other prompts"],
  fetch: ["loading cached KV", "reading cached blocks from a tier or another worker"],
  prefill: ["computing the prompt", "computing the rest of the prompt"],
  delay: ["slowing others", "what computing this prompt takes from the answers that run there"],
  transfer: ["sending KV", "the part of the KV transfer that computing does not hide"],
  memory: ["waiting for KV memory", "waiting until the decode worker has room"],
  decode: ["decoding", "decoding the answer"],
};

const nameOf = (term) => TERMS[term]?.[0] ?? term;
const meaningOf = (term) => TERMS[term]?.[1] ?? "";

export function showDecisions(snapshot) {
  const { terms, rows } = snapshot.decisions;
  const list = byId("decisions");
  showLegend(terms);
  setText(byId("shadow"), shadowOf(snapshot.shadow));
  reconcile(list, rows, (row) => row.id, makeRow, (node, row) => updateRow(node, row, terms));
  list.classList.toggle("empty", rows.length === 0);
  if (rows.length === 0 && !list.firstChild) setText(list, "");
}

/** What a request would have lost by other routing strategies, the most expensive first. */
function shadowOf(shadow) {
  const costs = Object.entries(shadow).map(([name, one]) => [name, one.mean_lost_s]);
  costs.sort(([, one], [, other]) => other - one);
  const words = costs.map(([name, lost]) => `${name} ${duration(lost)}`);
  return words.length ? `A request would have lost, with another routing strategy: ${words.join(", ")}` : "";
}

function showLegend(terms) {
  const swatch = (name) => element("span", { class: `swatch term-${name}`, "aria-hidden": "true" });
  const item = (name) => element("li", { title: meaningOf(name) }, swatch(name), nameOf(name));
  reconcile(byId("terms"), terms, (name) => name, item, () => {});
}

function makeRow() {
  return element(
    "li",
    { class: "decision" },
    element("p", { class: "head" }, element("span", { class: "what" }), element("span", { class: "when muted" })),
    element("p", { class: "ttft muted" }),
    element("p", { class: "why" }),
    candidateBar("chosen"),
    candidateBar("runner-up"),
    element("p", { class: "common muted" }),
    element(
      "details",
      {},
      element("summary", {}, "Terms"),
      element("table", {}, element("caption", { class: "hidden-text" }, "Terms in seconds")),
    ),
  );
}

function candidateBar(kind) {
  return element(
    "div",
    { class: `candidate ${kind}` },
    element("span", { class: "route" }),
    element("span", { class: "bar", "aria-hidden": "true" }),
    element("span", { class: "total" }),
  );
}

function updateRow(node, row, terms) {
  setText(node.querySelector(".when"), `${ago(row.age_s)} · ${row.tenant}`);
  setText(node.querySelector(".ttft"), ttftOf(row));
  const shown = JSON.stringify([row.outcome, row.error, row.chosen, row.runner_up]);
  if (node.shown === shown) return; // only its age and its first token change
  node.shown = shown;
  setText(node.querySelector(".what"), whatOf(row));
  setText(node.querySelector(".why"), whyOf(row, terms));
  node.classList.toggle("refused", row.error !== null);
  const common = commonOf(row, terms);
  const longest = Math.max(total(row.chosen), total(row.runner_up), common + 1e-9) - common;
  updateCandidate(node.querySelector(".chosen"), row.chosen, terms, common, longest);
  updateCandidate(node.querySelector(".runner-up"), row.runner_up, terms, common, longest);
  setText(node.querySelector(".common"), common >= LEAST_S ? `Not drawn: ${seconds(common)} of decoding, the same for both` : "");
  node.querySelector("details").hidden = row.chosen === null;
  if (row.chosen) fillTable(node.querySelector("table"), row, terms);
}

/** Decoding takes most of the time, and about as long anywhere: what both need would hide what decides. */
function commonOf(row, terms) {
  const place = terms.indexOf("decode");
  return row.chosen && row.runner_up && place >= 0 ? Math.min(row.chosen.terms[place], row.runner_up.terms[place]) : 0;
}

function updateCandidate(node, candidate, terms, common, longest) {
  node.hidden = !candidate;
  if (!candidate) return;
  setText(node.querySelector(".route"), routeOf(candidate));
  setAttribute(node.querySelector(".route"), "title", routeOf(candidate)); // it may be cut
  setText(node.querySelector(".total"), seconds(total(candidate)));
  drawStack(
    node.querySelector(".bar"),
    terms.map((name, place) => ({
      name: `term-${name}`,
      share: (candidate.terms[place] - (name === "decode" ? common : 0)) / longest,
    })),
  );
}

function whatOf(row) {
  if (row.num_prompt_tokens === null) return row.outcome;
  const cached = row.chosen.num_cached_tokens;
  const source = row.chosen.source ? ` from ${row.chosen.source}` : "";
  const hit = cached ? `, ${count(cached)} cached${source}` : ", none cached";
  return `${count(row.num_prompt_tokens)} prompt tokens${hit}`;
}

/** Why the chosen way is better, in words: where it saves, and what that costs. */
function whyOf(row, terms) {
  if (row.error) return `Refused: ${row.error}`;
  if (!row.chosen) return "";
  if (!row.runner_up) return isPair(row.chosen) ? "No worker alone could take it." : "No other worker could take it.";
  const differences = terms.map((name, place) => [name, row.runner_up.terms[place] - row.chosen.terms[place]]);
  const saved = wordsOf(differences, 1);
  const paid = wordsOf(differences, -1);
  const less = seconds(total(row.runner_up) - total(row.chosen));
  return `${less} cheaper${saved ? `: saves ${saved}` : ""}${paid ? `, pays ${paid}` : ""}`;
}

function wordsOf(differences, sign) {
  return differences
    .filter(([, difference]) => sign * difference >= LEAST_S)
    .sort(([, one], [, other]) => sign * (other - one))
    .slice(0, 3)
    .map(([name, difference]) => `${seconds(Math.abs(difference))} ${nameOf(name)}`)
    .join(", ");
}

function ttftOf(row) {
  if (row.error) return row.predicted_ttft_s === null ? "" : `first token predicted in ${duration(row.predicted_ttft_s)}`;
  const actual = row.actual_ttft_s === null ? "not there yet" : `came after ${duration(row.actual_ttft_s)}`;
  return `first token predicted in ${duration(row.predicted_ttft_s)}, ${actual}`;
}

function fillTable(table, row, terms) {
  const head = ["Term", "Chosen", "Runner-up", "Difference"];
  const difference = (place) => row.runner_up && row.runner_up.terms[place] - row.chosen.terms[place];
  const lines = terms.map((name, place) => [name, row.chosen.terms[place], row.runner_up?.terms[place], difference(place)]);
  lines.push(["total", total(row.chosen), row.runner_up && total(row.runner_up), row.runner_up && total(row.runner_up) - total(row.chosen)]);
  table.replaceChildren(
    table.caption,
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...lines.map(tableLine)),
  );
}

function tableLine([name, ...values]) {
  const swatch = element("span", { class: `swatch term-${name}`, "aria-hidden": "true" });
  const meaning = meaningOf(name) ? element("span", { class: "muted" }, ` ${meaningOf(name)}`) : "";
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, swatch, nameOf(name), meaning),
    ...values.map((value) => element("td", { class: "number" }, seconds(value ?? undefined))),
  );
}

function routeOf(candidate) {
  return isPair(candidate) ? `${candidate.prefill} → ${candidate.decode}` : `${candidate.decode} alone`;
}

function isPair(candidate) {
  return candidate.prefill !== candidate.decode;
}

function total(candidate) {
  return candidate ? candidate.terms.reduce((sum, term) => sum + term, 0) : 0;
}

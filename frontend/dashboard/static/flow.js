// The path of a request through the pools, with what waits and runs at each station now.

import { byId, element, reconcile, setAttribute, setText, setWidth } from "./dom.js";
import { bytes, count, duration, plural, rate } from "./format.js";

const ROLES = { prefill: "Prefill", decode: "Decode", colocated: "Prefill and decode" };

export function showFlow(snapshot) {
  const stations = stationsOf(snapshot);
  reconcile(byId("flow"), stations, (one) => one.key, makeStation, updateStation);
}

function stationsOf(snapshot) {
  const { traffic, pools } = snapshot;
  const isPair = "prefill" in pools && "decode" in pools;
  const stations = [
    {
      key: "router",
      title: "Router",
      figure: count(traffic.waiting),
      unit: "waiting",
      lines: [`${rate(traffic.admitted_per_s)} sent to workers /s`],
      flow: traffic.admitted_per_s,
    },
  ];
  if ("prefill" in pools) stations.push(prefillStation(pools.prefill, snapshot.kind, isPair));
  if (isPair && snapshot.kind === "workers") stations.push(transferStation(pools));
  for (const role of ["decode", "colocated"]) {
    if (role in pools) stations.push(decodeStation(role, pools[role], snapshot.kind));
  }
  stations.push({
    key: "clients",
    title: "Clients",
    figure: rate(traffic.output_tokens_per_s),
    unit: "tokens /s",
    lines: [`${rate(traffic.finished_per_s)} answers finished /s`, `${count(traffic.running)} running`],
  });
  return stations;
}

function prefillStation(pool, kind, isPair) {
  return {
    key: "prefill",
    role: "prefill",
    title: ROLES.prefill,
    workers: pool,
    figure: count(pool.prompts),
    unit: pool.prompts === 1 ? "prompt" : "prompts",
    lines: [`${count(pool.queued_tokens)} tokens to compute`, `shortest queue ${duration(pool.queue_s)}`],
    flow: isPair && kind === "workers" ? pool.handoffs_per_s : pool.prompts,
  };
}

function transferStation({ prefill, decode }) {
  return {
    key: "transfer",
    title: "KV transfer",
    figure: count(decode.leases),
    unit: "on the way",
    lines: [
      `${rate(prefill.handoffs_per_s)} handoffs /s, ${bytes(prefill.bytes_per_s)}/s`,
      `${duration(prefill.exposed_s)} not hidden by prefill`,
    ],
    flow: prefill.handoffs_per_s,
  };
}

function decodeStation(role, pool, kind) {
  const running = kind === "workers" ? pool.running : pool.booked;
  const waiting = pool.prompts ? `${plural(pool.prompts, "prompt")} to compute here` : "no prompts to compute here";
  return {
    key: role,
    role,
    title: ROLES[role],
    workers: pool,
    figure: count(running),
    unit: pool.seats ? `of ${count(pool.seats)} seats` : "running",
    share: pool.seats ? running / pool.seats : null,
    lines: [waiting, pool.for_room ? `${count(pool.for_room)} wait for KV memory` : "nothing waits for KV memory"],
    flow: running,
  };
}

function makeStation(station) {
  return element(
    "li",
    { class: "station panel" },
    element("h3", {}, element("span", { class: `role ${station.role ?? ""}` }), station.title),
    element("p", { class: "workers muted" }),
    element("p", { class: "value" }, element("strong", { class: "figure" }), " ", element("span", { class: "unit" })),
    element("span", { class: "bar thin", "aria-hidden": "true" }, element("span", { class: "part" })),
    element("p", { class: "muted line" }),
    element("p", { class: "muted line" }),
  );
}

function updateStation(node, station) {
  const workers = station.workers;
  const down = workers ? workers.num_workers - workers.num_ready : 0;
  const text = workers ? plural(workers.num_workers, "worker") + (down ? `, ${down} not ready` : "") : "";
  setText(node.querySelector(".workers"), text);
  setText(node.querySelector(".figure"), station.figure);
  setText(node.querySelector(".unit"), station.unit);
  node.querySelector(".bar").hidden = station.share === undefined || station.share === null;
  setWidth(node.querySelector(".part"), station.share ?? 0);
  node.querySelectorAll(".line").forEach((line, place) => setText(line, station.lines[place] ?? ""));
  setAttribute(node, "data-flows", station.flow > 0 ? "yes" : "no");
}

// The KV cache: how full each tier is, where prompt tokens came from, and what more memory would buy.

import { barRow, drawStack, updateBarRow } from "./charts.js";
import { drawCurve } from "./curve.js";
import { byId, element, reconcile, setText } from "./dom.js";
import { bytes, percent } from "./format.js";

const TIERS = { pool: "Pool", host: "Host memory", disk: "NVMe", object: "Object store", peer: "Other workers" };

export function showCache(snapshot) {
  const hasTiers = snapshot.tiers !== undefined; // of engines only those that offload KV
  byId("cache-panel").hidden = !hasTiers;
  if (!hasTiers) return;
  showTiers(snapshot.tiers, snapshot.curve.block_bytes);
  showHits(snapshot.hits);
  showCurve(snapshot.curve);
}

function showTiers(tiers, blockBytes) {
  reconcile(byId("tiers"), tiers, (tier) => tier.name, (tier) => barRow(nameOf(tier.name)), (row, tier) => {
    const share = tier.capacity_blocks ? tier.num_blocks / tier.capacity_blocks : null;
    const size = bytes(tier.capacity_blocks * blockBytes);
    const held = blockBytes ? bytes(tier.num_blocks * blockBytes) : `${tier.num_blocks} blocks`;
    const text = tier.capacity_blocks && blockBytes ? `${percent(share)} of ${size}` : held;
    updateBarRow(row, share, text);
  });
}

function showHits(hits) {
  const node = byId("hits");
  if (!node.firstChild) {
    node.append(
      element("div", { class: "bar tall", "aria-hidden": "true" }),
      element("ul", { class: "legend" }),
      element("p", { class: "muted" }),
    );
  }
  const [bar, legend, note] = node.children;
  drawStack(bar, hits.map(({ source, share }) => ({ name: `source-${source}`, share })));
  reconcile(
    legend,
    hits.filter(({ share }) => share > 0),
    ({ source }) => source,
    ({ source }) =>
      element(
        "li",
        {},
        element("span", { class: `swatch source-${source}`, "aria-hidden": "true" }),
        `${source === "computed" ? "Computed" : nameOf(source)} `,
        element("span", { class: "value" }),
      ),
    (item, { share }) => setText(item.querySelector(".value"), percent(share)),
  );
  bar.hidden = hits.length === 0;
  setText(note, hits.length === 0 ? "No prompts in the last minute." : "");
}

function showCurve(curve) {
  const hasTraffic = curve.num_tokens > 0 && curve.block_bytes > 0 && curve.points.length > 1;
  drawCurve(byId("curve"), hasTraffic ? curve : null);
  reconcile(
    byId("levels"),
    hasTraffic ? curve.levels : [],
    (level) => level.name,
    () => element("li", {}),
    (item, level) => setText(item, twiceOf(level)),
  );
  reconcile(byId("advice"), curve.advice, (words) => words.split(" ")[0], () => element("li", {}), setText);
}

/** What twice a tier would buy, in words. */
function twiceOf(level) {
  const points = (100 * (level.twice_hit_ratio - level.hit_ratio)).toFixed(1);
  const gain = points === "0.0" ? "no fewer to compute" : `${points} points fewer to compute`;
  const size = `${nameOf(level.name)} ${bytes(level.num_bytes)} → ${bytes(2 * level.num_bytes)}`;
  const misses = `misses ${percent(1 - level.hit_ratio)} → ${percent(1 - level.twice_hit_ratio)}`;
  return `${size}: ${misses}, ${gain}`;
}

function nameOf(tier) {
  return TIERS[tier] ?? tier;
}

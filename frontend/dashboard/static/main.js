// The page's life: key, connection, and handing each snapshot to the panels.

import { showAutoscaler } from "./autoscaler.js";
import { showCache } from "./cache.js";
import { showDecisions } from "./decisions.js";
import { byId, setText } from "./dom.js";
import { showErrors } from "./errors.js";
import { showFlow } from "./flow.js";
import { timeOfDay } from "./format.js";
import { forgetKey, saveKey, savedKey } from "./key.js";
import { showMembers } from "./members.js";
import { EventStream } from "./stream.js";
import { showTenants } from "./tenants.js";
import { showTraffic } from "./traffic.js";

const OLD_MS = 4000; // snapshots come once a second
const PANELS = [showTraffic, showFlow, showDecisions, showAutoscaler, showCache, showTenants, showErrors, showMembers];

let lastTimeMs = 0; // when the snapshot came that is shown, by the clock on the wall
let lastSeenMs = 0; // the same by a clock that nobody can set
let shownState = "";
let retryAtMs = 0; // by that clock too
let problem = "";
let isPaused = false;

const stream = new EventStream("v1/dashboard", {
  event(name, data) {
    if (name !== "snapshot") {
      problem = data.message;
      return showState("old");
    }
    problem = "";
    byId("key-form").hidden = true;
    byId("pause").hidden = false;
    byId("forget").hidden = !savedKey();
    if (isPaused) return showState("paused");
    lastTimeMs = Date.now();
    lastSeenMs = performance.now();
    show(data);
    showState("live");
  },
  lost(retryMs) {
    retryAtMs = performance.now() + retryMs;
    showState("disconnected");
  },
  problem(message) {
    problem = message;
  },
  refused(status, message) {
    forgetKey();
    askForKey(stream.key ? message : "");
  },
});

function show(snapshot) {
  byId("panels").hidden = false;
  setText(byId("models"), snapshot.models.join(", "));
  setText(byId("version"), `Tandem ${snapshot.version}`);
  setText(byId("settings"), settingsOf(snapshot.settings));
  for (const showPanel of PANELS) showPanel(snapshot);
}

/** The flags that differ from their defaults. */
function settingsOf(settings) {
  const flags = Object.entries(settings).map(([flag, value]) => (value ? `${flag} ${value}` : flag));
  return flags.length ? `Started with ${flags.join(" ")}` : "Started without flags";
}

/** Say what the figures are worth. They are never shown as live when they are not. */
function showState(state) {
  const since = lastTimeMs ? ` since ${timeOfDay(lastTimeMs / 1000)}` : "";
  const texts = {
    connecting: "Connecting …",
    live: "Live",
    paused: `Paused${since}`,
    old: `No new data${since}`,
    disconnected: lastTimeMs ? `Disconnected${since}` : "Not connected",
    key: "A key is needed",
  };
  document.body.dataset.state = state;
  if (shownState !== texts[state]) {
    shownState = texts[state];
    setText(byId("status"), shownState);
    document.title = state === "live" ? "Tandem dashboard" : `${shownState} – Tandem dashboard`;
  }
  const hasWarning = state === "old" || state === "disconnected";
  const banner = byId("banner");
  banner.hidden = !hasWarning;
  setText(banner, hasWarning ? `${texts[state]}. ${lastTimeMs ? "All figures below are of then. " : ""}${problem}` : "");
  showDetail(state);
}

/** What changes every second is not read out by screen readers. */
function showDetail(state) {
  const wait = Math.max(0, Math.round((retryAtMs - performance.now()) / 1000));
  const detail = {
    live: lastTimeMs ? timeOfDay(lastTimeMs / 1000) : "",
    disconnected: stream.isOpen && wait ? `trying again in ${wait} s` : "trying again …",
  };
  setText(byId("detail"), detail[state] ?? "");
}

function askForKey(message) {
  showState("key");
  byId("panels").hidden = true;
  byId("pause").hidden = byId("forget").hidden = true;
  byId("key-form").hidden = false;
  setText(byId("key-error"), message);
  byId("key").focus();
}

function open() {
  showState(lastTimeMs ? "disconnected" : "connecting");
  stream.start(savedKey());
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(byId("key").value.trim());
  byId("key").value = "";
  setText(byId("key-error"), "");
  open();
});

byId("forget").addEventListener("click", () => {
  forgetKey();
  stream.stop();
  lastTimeMs = 0;
  askForKey("");
});

byId("pause").addEventListener("click", () => {
  isPaused = !isPaused;
  byId("pause").setAttribute("aria-pressed", isPaused);
  setText(byId("pause"), isPaused ? "Go on" : "Pause");
  if (isPaused && document.body.dataset.state === "live") showState("paused");
});

// A tab that nobody sees costs the server nothing.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) stream.stop();
  else if (byId("key-form").hidden) open();
});
window.addEventListener("online", () => byId("key-form").hidden && open());

/** Whether no snapshot came for a while. One clock may be set back, and the other one may stop while a laptop sleeps. */
function isOld() {
  return Math.max(Date.now() - lastTimeMs, performance.now() - lastSeenMs) > OLD_MS;
}

setInterval(() => {
  const state = document.body.dataset.state;
  if (state === "live" && isOld()) showState("old");
  else if (state === "live" || state === "disconnected") showDetail(state);
}, 1000);

open();

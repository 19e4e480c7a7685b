// Numbers as text, with their units. What is not known is a dash.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const cents = new Intl.NumberFormat("en", { maximumFractionDigits: 2 });
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export function count(value) {
  return isKnown(value) ? whole.format(value) : NONE;
}

/** A number with at most three digits that matter: 0.25, 12.5, 12,300. Less than a hundredth is no news. */
export function rate(value) {
  if (!isKnown(value)) return NONE;
  if (Math.abs(value) < 1) return value > 0 && value < 0.01 ? "<0.01" : cents.format(value);
  return Math.abs(value) >= 1000 ? whole.format(value) : short.format(value);
}

/** A duration in the unit that reads best. */
export function duration(seconds) {
  if (!isKnown(seconds)) return NONE;
  if (Math.abs(seconds) < 1) return `${short.format(Number((1000 * seconds).toFixed(1)))} ms`;
  return `${seconds.toFixed(seconds < 10 ? 2 : seconds < 100 ? 1 : 0)} s`;
}

/** Seconds in one unit, to be compared with each other. */
export function seconds(value) {
  return isKnown(value) ? `${value.toFixed(Math.abs(value) < 10 ? 3 : 1)} s` : NONE;
}

export function percent(share) {
  if (!isKnown(share)) return NONE;
  const percents = 100 * share;
  return `${percents > 0 && percents < 10 ? percents.toFixed(1) : percents.toFixed(0)}%`;
}

export function bytes(value) {
  if (!isKnown(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let unit = 0;
  for (; value >= 1000 && unit < units.length - 1; unit += 1) value /= 1000;
  return `${short.format(value)} ${units[unit]}`;
}

/** The time of day of a Unix time, where the reader is. */
export function timeOfDay(unixSeconds) {
  return new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");
}

export function ago(secondsAgo) {
  if (secondsAgo < 1) return "now";
  if (secondsAgo < 60) return `${Math.round(secondsAgo)} s ago`;
  return secondsAgo < 3600 ? `${Math.round(secondsAgo / 60)} min ago` : `${Math.round(secondsAgo / 3600)} h ago`;
}

export function plural(number, name) {
  return `${count(number)} ${name}${number === 1 ? "" : "s"}`;
}

function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

// Reads server-sent events by fetch, because EventSource cannot send an Authorization header. Reconnects with backoff.

import { authorization } from "./key.js";

const FIRST_DELAY_MS = 1000;
const MAX_DELAY_MS = 15000;
const SILENCE_MS = 15000; // the server sends something at least every five seconds

/**
 * A stream that keeps itself open. `on` has the listeners:
 *   event(name, data)     an event came
 *   lost(retryMs)         the connection ended or could not be made; it is tried again then
 *   refused(status, text) the server does not want this key: the stream stops
 */
export class EventStream {
  constructor(url, on) {
    this.url = url;
    this.on = on;
    this.key = "";
    this.controller = null;
    this.retry = 0;
    this.delayMs = FIRST_DELAY_MS;
  }

  get isOpen() {
    return this.controller !== null || this.retry !== 0;
  }

  /** Open with this key; "" = none. */
  start(key) {
    this.stop();
    this.key = key;
    this.delayMs = FIRST_DELAY_MS;
    this.connect();
  }

  stop() {
    clearTimeout(this.retry);
    this.retry = 0;
    this.controller?.abort();
    this.controller = null;
  }

  async connect() {
    this.retry = 0;
    const controller = (this.controller = new AbortController());
    let retryMs = null;
    try {
      retryMs = await this.read(controller);
    } catch {
      retryMs = this.delayMs * (0.8 + 0.4 * Math.random()); // not all viewers at once
    }
    if (this.controller !== controller) return; // stopped, or started anew
    this.controller = null;
    if (retryMs === null) return;
    this.delayMs = Math.min(2 * this.delayMs, MAX_DELAY_MS);
    this.retry = setTimeout(() => this.connect(), retryMs);
    this.on.lost(retryMs);
  }

  /** Read until the stream ends. Returns milliseconds until the next try; null = never. */
  async read(controller) {
    let watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
    try {
      const response = await fetch(this.url, { headers: authorization(this.key), signal: controller.signal, cache: "no-store" });
      if (!response.ok) return await this.refusal(response);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return FIRST_DELAY_MS;
        clearTimeout(watchdog);
        watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
        const parts = (text + value).split("\n\n");
        text = parts.pop();
        if (this.controller !== controller) return null;
        for (const part of parts) this.emit(part);
      }
    } finally {
      clearTimeout(watchdog);
    }
  }

  async refusal(response) {
    const body = await response.json().catch(() => ({}));
    const message = body.error?.message ?? `The server answered with status ${response.status}.`;
    if (response.status === 401 || body.error?.code === "operator_key_required") {
      this.on.refused(response.status, message);
      return null;
    }
    const retryAfter = Number(response.headers.get("retry-after"));
    this.on.problem(message);
    return Math.max(1000 * retryAfter || 0, this.delayMs);
  }

  emit(part) {
    const fields = new Map(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
    if (!fields.has("data")) return; // a comment: the connection lives
    this.delayMs = FIRST_DELAY_MS;
    this.on.event(fields.get("event"), JSON.parse(fields.get("data")));
  }
}

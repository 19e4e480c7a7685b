// A form that sends a request of one route, and shows the answer as it arrives.

import { element } from "./dom.js";

const MAX_SHOWN_CHARS = 200_000;

export function requestForm(method, path, operation, keyOf) {
  const fields = (operation.parameters ?? []).map((parameter) => [parameter, input(operation, parameter)]);
  const media = operation.requestBody?.content["application/json"];
  const body = media ? element("textarea", { rows: 8, spellcheck: false, value: example(media) }) : null;
  if (body) body.setAttribute("aria-label", "Body");
  const send = element("button", { type: "submit" }, "Send");
  const stop = element("button", { type: "button", hidden: true }, "Stop");
  const status = element("p", { className: "muted", attributes: { role: "status" } });
  const output = element("pre", { hidden: true, tabIndex: 0 });
  const rows = fields.map(([parameter, field]) => element("label", { className: "row" }, parameter.name, field));
  const form = element("form", { className: "request" }, ...rows, body, element("div", { className: "row" }, send, stop));
  form.append(status, output);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const leaving = new AbortController();
    stop.onclick = () => leaving.abort();
    [send.disabled, stop.hidden, output.hidden, output.textContent] = [true, false, false, ""];
    try {
      const { url, headers } = target(path, fields, keyOf());
      if (body) headers.set("content-type", "application/json");
      const answer = await fetch(url, { method, headers, body: body?.value, signal: leaving.signal });
      status.textContent = `${answer.status} ${answer.statusText}`;
      await show(answer, output);
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`;
    } finally {
      [send.disabled, stop.hidden] = [false, true];
    }
  });
  return form;
}

function input(operation, parameter) {
  const made = element("input", { required: parameter.required === true, spellcheck: false });
  made.title = parameter.description ?? "";
  return made;
}

function example(media) {
  return JSON.stringify(media.example ?? {}, null, 2);
}

function target(path, fields, key) {
  const headers = new Headers(key ? { authorization: `Bearer ${key}` } : {});
  const query = new URLSearchParams();
  let filled = path;
  for (const [parameter, { value }] of fields) {
    if (parameter.in === "path") filled = filled.replace(`{${parameter.name}}`, encodeURIComponent(value));
    else if (value && parameter.in === "query") query.set(parameter.name, value);
    else if (value) headers.set(parameter.name, value);
  }
  const url = new URL(`.${filled}`, location.href);
  url.search = query.toString();
  return { url, headers };
}

async function show(answer, output) {
  const isJson = (answer.headers.get("content-type") ?? "").startsWith("application/json");
  if (isJson) {
    const text = await answer.text();
    output.textContent = JSON.stringify(JSON.parse(text), null, 2).slice(0, MAX_SHOWN_CHARS);
    return;
  }
  const decoder = new TextDecoder();
  for (let reader = answer.body.getReader(), num = 0; num < MAX_SHOWN_CHARS; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const text = decoder.decode(value, { stream: true });
    num += text.length;
    output.append(text);
  }
}

// Shows the server's OpenAPI document.

import { element, lazyDetails, prose } from "./dom.js";
import { requestForm } from "./request.js";
import { Schemas } from "./schema.js";

const KEY = "tandem.key"; // in sessionStorage, as the dashboard's: forgotten with the tab
const METHODS = ["get", "post", "put", "patch", "delete"];
const byId = (id) => document.getElementById(id);
const keyOf = () => sessionStorage.getItem(KEY) ?? "";

async function load() {
  const key = keyOf();
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(new URL("openapi.json", location.href), { headers });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? `the server answered ${answer.status}`);
  return body;
}

function show(document) {
  byId("version").textContent = document.info.version;
  byId("description").replaceChildren(...prose(document.info.description));
  const schemas = new Schemas(document);
  const byTag = new Map((document.tags ?? []).map(({ name }) => [name, []]));
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const method of METHODS.filter((one) => one in methods)) {
      const tag = methods[method].tags?.[0] ?? "other";
      byTag.set(tag, [...(byTag.get(tag) ?? []), route(schemas, method.toUpperCase(), path, methods[method])]);
    }
  }
  const sections = [...byTag].map(([tag, routes]) => element("section", {}, element("h2", {}, tag), ...routes));
  byId("routes").replaceChildren(...sections);
  openLinked();
}

function route(schemas, method, path, operation) {
  const summary = [
    element("span", { className: "method", dataset: { method } }, method),
    " ",
    element("code", { className: "path" }, path),
    " ",
    element("span", { className: "muted" }, ...prose(operation.summary)),
  ];
  const properties = { id: operation.operationId, className: "route", dataset: { text: `${method} ${path}`.toLowerCase() } };
  return lazyDetails(properties, summary, () => [
    element("p", {}, ...prose(operation.description)),
    ...parameters(operation.parameters ?? [], schemas),
    ...requestBody(operation.requestBody, schemas),
    element("h3", {}, "Answers"),
    ...Object.entries(operation.responses).map(([status, response]) => answer(status, response, schemas)),
    element("h3", {}, "Try it"),
    requestForm(method, path, operation, keyOf),
  ]);
}

function parameters(given, schemas) {
  if (!given.length) return [];
  const rows = given.map(({ name, in: place, schema, description }) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, element("code", {}, name)),
      element("td", {}, `${place}, ${schemas.text(schema)}`),
      element("td", {}, ...prose(description)),
    ),
  );
  const table = element("table", {}, element("tbody", {}, ...rows));
  return [element("h3", {}, "Parameters"), element("div", { className: "scroll" }, table)];
}

function requestBody(body, schemas) {
  return body ? [element("h3", {}, "Body"), ...schemas.show(body.content["application/json"].schema)] : [];
}

function answer(status, response, schemas) {
  const summary = [element("code", {}, status), " ", ...prose(response.description)];
  return lazyDetails({}, summary, () =>
    Object.entries(response.content ?? {}).flatMap(([type, media]) => [
      element("p", { className: "muted" }, type),
      ...schemas.show(eventData(media.schema) ?? media.schema),
    ]),
  );
}

// The schema of the JSON in a stream's events.
function eventData(schema) {
  const data = schema.properties?.data;
  return [data, ...(data?.anyOf ?? [])].find((one) => one?.contentSchema)?.contentSchema;
}

function openLinked() {
  const linked = location.hash && byId(location.hash.slice(1));
  if (linked instanceof HTMLDetailsElement) linked.open = true;
}

function filter() {
  const wanted = byId("filter").value.trim().toLowerCase();
  for (const one of document.querySelectorAll(".route")) one.hidden = !one.dataset.text.includes(wanted);
}

async function start() {
  const banner = byId("banner");
  try {
    show(await load());
    banner.hidden = true;
  } catch (error) {
    banner.textContent = `openapi.json cannot be shown: ${error.message}`;
    banner.hidden = false;
  }
}

byId("key").value = keyOf();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("key").value.trim());
  start();
});
byId("filter").addEventListener("input", filter);
addEventListener("hashchange", openLinked);
start();

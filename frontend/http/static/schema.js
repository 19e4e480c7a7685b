// Shows JSON schemas as tables of fields.

import { element, lazyDetails, prose } from "./dom.js";

export class Schemas {
  constructor(document) {
    this.components = document.components?.schemas ?? {};
  }

  // The schema behind a reference, or itself.
  resolve(schema) {
    const name = schema?.$ref?.split("/").pop();
    return name ? this.components[name] : schema;
  }

  // A type in words.
  text(schema) {
    if (schema.$ref) return schema.$ref.split("/").pop();
    if (schema.anyOf) return schema.anyOf.map((one) => this.text(one)).join(" or ");
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.type === "array") return `list of ${schema.items ? this.text(schema.items) : "anything"}`;
    if (schema.type === "object" && schema.additionalProperties?.type) {
      return `object of ${this.text(schema.additionalProperties)}`;
    }
    return (schema.type ?? "anything") + bounds(schema);
  }

  // The objects with fields that a schema consists of.
  objects(schema) {
    if (schema.$ref) return this.resolve(schema)?.properties ? [schema] : [];
    const parts = [...(schema.anyOf ?? []), schema.items, schema.additionalProperties];
    return parts.filter((part) => part && typeof part === "object").flatMap((part) => this.objects(part));
  }

  // What to show of a schema.
  show(schema) {
    const whole = this.resolve(schema);
    if (!whole.properties) {
      const nested = this.objects(whole).map((one) => this.nested(one));
      return [element("p", {}, element("code", {}, this.text(whole)), " ", ...prose(whole.description)), ...nested];
    }
    const required = new Set(whole.required ?? []);
    const rows = Object.entries(whole.properties).flatMap(([name, field]) => this.rows(name, field, required.has(name)));
    const head = ["Field", "Type", "Meaning"].map((title) => element("th", { scope: "col" }, title));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
    const only = whole.allOf?.[0].oneOf.map((one) => `\`${one.required[0]}\``).join(", ");
    const rule = only ? [element("p", {}, ...prose(`Exactly one of ${only} is given.`))] : [];
    return [element("p", {}, ...prose(whole.description)), ...rule, element("div", { className: "scroll" }, table)];
  }

  // The row of a field, and one that has the fields of its objects.
  rows(name, field, isRequired) {
    const mark = isRequired ? element("small", { className: "required" }, " required") : null;
    const cells = [
      element("th", { scope: "row" }, element("code", {}, name), mark),
      element("td", {}, this.text(field)),
      element("td", {}, ...prose(field.description)),
    ];
    const nested = this.objects(field).map((one) => this.nested(one));
    const more = nested.length ? [element("tr", {}, element("td", { colSpan: 3, className: "nested" }, ...nested))] : [];
    return [element("tr", {}, ...cells), ...more];
  }

  nested(reference) {
    return lazyDetails({}, [this.text(reference)], () => this.show(reference));
  }
}

function bounds(schema) {
  const said = [];
  if (schema.minimum !== undefined) said.push(`from ${schema.minimum}`);
  if (schema.exclusiveMinimum !== undefined) said.push(`above ${schema.exclusiveMinimum}`);
  if (schema.maximum !== undefined) said.push(`to ${schema.maximum}`);
  if (schema.minLength === 1) said.push("not empty");
  if (schema.maxLength !== undefined) said.push(`at most ${schema.maxLength} characters`);
  return said.length ? ` ${said.join(" ")}` : "";
}

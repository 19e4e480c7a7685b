// Building and updating the page. Text is only ever set as text: names of workers, tenants and models may be hostile.

const SVG = "http://www.w3.org/2000/svg";

/** A new element with attributes and children; a child that is no node becomes text. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for elements of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** The element with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Set an element's text, if it is another one. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Set or (null) remove an attribute, if it changes. */
export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, value);
}

/** Set the width of a bar's part, as a share of 1. */
export function setWidth(node, share) {
  const width = `${(100 * Math.min(Math.max(share, 0), 1)).toFixed(2)}%`;
  if (node.style.width !== width) node.style.width = width;
}

/**
 * Give a container one child for each item, in their order. Children are kept by key, so that only what changed is
 * touched: `create(item)` makes a child, `update(child, item)` shows an item in it.
 */
export function reconcile(container, items, keyOf, create, update) {
  const known = container.childrenByKey ?? new Map();
  const found = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (found.has(key)) continue;
    const child = known.get(key) ?? create(item);
    update(child, item);
    found.set(key, child);
  }
  for (const [key, child] of known) if (!found.has(key)) child.remove();
  let place = container.firstChild;
  for (const child of found.values()) {
    if (child === place) place = place.nextSibling;
    else container.insertBefore(child, place);
  }
  container.childrenByKey = found;
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

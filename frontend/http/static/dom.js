// Makes elements. Text is never parsed as HTML, so the document and answers cannot bring scripts.

export function element(tag, properties = {}, ...children) {
  const { dataset, attributes, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  Object.assign(made.dataset, dataset ?? {});
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// A <details> whose content is made when it is first opened: schemas may refer to themselves.
export function lazyDetails(properties, summary, makeContent) {
  const details = element("details", properties, element("summary", {}, ...summary));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(...makeContent());
  });
  return details;
}

// Text with `code` in it.
export function prose(text) {
  const parts = (text ?? "").split("`");
  return parts.map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

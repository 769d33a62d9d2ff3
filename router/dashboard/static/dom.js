// Builds elements without markup strings, so API data is only ever text.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Gives `parent` one element per item, in order. Elements are reused by key, which keeps focus, animations and
// transitions. `make` gets the item, `update` the element and the item.
export function keyed(parent, items, keyOf, make, update) {
  const known = (parent._keyed ??= new Map());
  const wanted = new Set();
  let at = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = make(item)));
    update?.(element, item);
    if (element === at) at = at.nextSibling;
    else parent.insertBefore(element, at);
  }
  for (const [key, element] of known) {
    if (!wanted.has(key)) {
      element.remove();
      known.delete(key);
    }
  }
}

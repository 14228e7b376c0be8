/** Elements made of names and texts: nothing is ever parsed as HTML. */

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * A new element.
 * @param {string} name
 * @param {Object<string, string>} attributes
 * @param {...(Node | string)} children strings become text
 */
export function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A section's JSON for people: labels and values, lists in lists. */

import { make } from "./dom.js";
import { label, scalar } from "./format.js";

const WORDS_CHARACTERS = 24;

/** @returns {Node} */
export function valueNode(value, field = "") {
  if (value === null || typeof value !== "object") return make("span", {}, scalar(value, field));
  if (!Array.isArray(value)) return fields(value);
  if (value.length === 0) return make("span", { class: "quiet" }, "none");
  const items = value.map((one) => make("li", {}, valueNode(one, field)));
  return make("ul", { class: value.every(isWords) ? "words" : "values" }, ...items);
}

/** A word or a few, which go side by side; a sentence has a line of its own. */
function isWords(value) {
  if (value !== null && typeof value === "object") return false;
  const text = String(value);
  return text.length <= WORDS_CHARACTERS && !text.endsWith(".");
}

function fields(object) {
  const list = make("dl", { class: "fields" });
  for (const [field, value] of Object.entries(object)) {
    const row = make("div", {}, make("dt", {}, label(field)), make("dd", {}, valueNode(value, field)));
    list.append(row);
  }
  return list;
}

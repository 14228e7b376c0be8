/** What to ask: sections of the report, or one own question. */

import { byId, make } from "./dom.js";
import { EntryError } from "./song.js";

export class QuestionForm {
  constructor() {
    this.presets = [];
    for (const radio of document.getElementsByName("mode")) {
      radio.addEventListener("change", () => this.show());
    }
    byId("sections").addEventListener("change", () => this.count());
    byId("all").addEventListener("click", () => this.check(true));
    byId("none").addEventListener("click", () => this.check(false));
    this.show();
  }

  /** @param {{name: string, label: string, description: string, report_key: string}[]} presets */
  offer(presets) {
    this.presets = presets;
    byId("sections").replaceChildren(...presets.map(sectionItem));
    this.count();
  }

  /**
   * The presets that are asked for, or the question.
   * @returns {{presets: object[], question: string | null}}
   * @throws {EntryError}
   */
  read() {
    if (this.isQuestion) return { presets: [], question: this.readQuestion() };
    const presets = this.presets.filter((_, index) => this.boxes[index].checked);
    if (presets.length === 0) throw new EntryError("Choose at least one section.", byId("all"));
    return { presets, question: null };
  }

  readQuestion() {
    const question = byId("question").value.trim();
    if (!question) throw new EntryError("Write your question first.", byId("question"));
    return question;
  }

  get isQuestion() {
    return document.querySelector("input[name=mode]:checked").value === "question";
  }

  get boxes() {
    return byId("sections").querySelectorAll("input");
  }

  check(isChecked) {
    for (const box of this.boxes) box.checked = isChecked;
    this.count();
  }

  count() {
    const numChecked = [...this.boxes].filter((box) => box.checked).length;
    byId("num-sections").textContent = `${numChecked} of ${this.boxes.length} sections`;
  }

  show() {
    byId("report-fields").hidden = this.isQuestion;
    byId("question-fields").hidden = !this.isQuestion;
    byId("submit").textContent = this.isQuestion ? "Ask" : "Make report";
  }
}

function sectionItem({ name, label, description }) {
  const box = make("input", { type: "checkbox", value: name });
  box.checked = true;
  const words = make("span", {}, label, make("span", { class: "quiet" }, description));
  return make("li", {}, make("label", {}, box, words));
}

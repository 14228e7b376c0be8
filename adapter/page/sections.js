/** The sections of a report on the page, each an article that fills in as its text comes. */

import { make } from "./dom.js";
import { dollars, seconds } from "./format.js";
import { valueNode } from "./values.js";

const STATES = { waiting: "waiting", writing: "writing…", stopped: "stopped", failed: "no answer" };

export class SectionViews {
  /** @param {HTMLElement} root holds nothing else */
  constructor(root) {
    this.root = root;
    this.views = [];
  }

  /** @param {import("./report.js").Report} report */
  show(report) {
    this.views = report.sections.map((section, index) => new SectionView(section, index));
    this.root.replaceChildren(...this.views.map((view) => view.article));
  }

  /** Show what came of one section. */
  update(index) {
    this.views[index].update();
  }

  updateAll() {
    for (const view of this.views) view.update();
  }
}

class SectionView {
  constructor(section, index) {
    this.section = section;
    this.shown = "";
    this.draft = make("p", { class: "draft" });
    this.state = make("span", { class: "state quiet numbers" });
    this.body = make("div", { class: "body" }, this.draft);
    const id = `section-${index}`;
    const title = make("h3", { id }, section.label);
    const head = make("div", { class: "row" }, title, this.state);
    this.article = make("article", { "aria-labelledby": id }, head, this.body);
    this.update();
  }

  update() {
    const { state, text, answer } = this.section;
    this.article.dataset.state = state;
    this.article.setAttribute("aria-busy", String(state === "writing"));
    this.state.textContent = answer ? billed(answer, state) : STATES[state];
    if (answer) this.body.replaceChildren(...answerNodes(answer));
    else this.write(text);
  }

  write(text) {
    if (text.startsWith(this.shown)) this.draft.append(text.slice(this.shown.length));
    else this.draft.textContent = text;
    this.shown = text;
  }
}

function billed(answer, state) {
  const cost = `${seconds(answer.elapsed_seconds)} · ${dollars(answer.cost_usd)}`;
  return state === "failed" ? `${STATES.failed} · ${cost}` : cost;
}

function answerNodes(answer) {
  const nodes = [];
  if (answer.disputed_by_measurement) {
    nodes.push(make("p", { class: "mark" }, "Disputed by measurement: its tempo or key is not what was measured."));
  }
  if (answer.error) nodes.push(make("p", { class: "failure" }, answer.error.message));
  nodes.push(...said(answer), ...asides(answer));
  return nodes;
}

function said({ data, response, error }) {
  if (error) return response ? [fold("What was written", make("pre", {}, response))] : [];
  if (data === null || data === undefined) return [make("p", { class: "text" }, response || "–")];
  return [valueNode(data), fold("JSON", make("pre", {}, JSON.stringify(data, null, 2)))];
}

function asides({ reasoning, finish_reason: reason, error }) {
  const nodes = [];
  if (reasoning) nodes.push(fold("Reasoning", make("p", { class: "text" }, reasoning)));
  if (reason === "length" && !error) nodes.push(note("Cut off where its length ends."));
  if (reason === "repetition") nodes.push(note("Stopped where it began to repeat itself."));
  return nodes;
}

function note(text) {
  return make("p", { class: "quiet" }, text);
}

function fold(title, content) {
  return make("details", {}, make("summary", {}, title), content);
}

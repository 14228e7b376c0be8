/** The page: a song and questions go to the server, a report comes back as it is written. */

import { ApiError, Client } from "./client.js";
import { byId, make } from "./dom.js";
import { clock, dollars, measurements, seconds } from "./format.js";
import { toMarkdown } from "./markdown.js";
import { QuestionForm } from "./questions.js";
import { Report } from "./report.js";
import { SectionViews } from "./sections.js";
import { EntryError, SongForm } from "./song.js";
import { readEvents } from "./stream.js";

const KEY = "api-key";
const HEALTH_SECONDS = 3;

const isNarrow = matchMedia("(max-width: 52rem)"); // as in style.css: the report is below the form

const client = new Client(() => byId("key").value.trim());
const song = new SongForm();
const questions = new QuestionForm();
const views = new SectionViews(byId("answers"));

let report = null; // the one on the page
let running = null; // the AbortController of the request in flight
let startedAt = 0;

// What to ask.

/** The request for what was entered: where it goes, its JSON, and the sections it will fill. */
function compose(asked, { presets, question }) {
  const part = {};
  if (asked.startSeconds !== null) part.start_seconds = asked.startSeconds;
  if (asked.endSeconds !== null) part.end_seconds = asked.endSeconds;
  if (question !== null) {
    const request = { ...asked.fields, ...part, prompt: question, stop_on_repetition: true };
    const section = { label: question, report_key: "answer", preset: null };
    return { path: "generate", request, sections: [section] };
  }
  const sections = presets.map(({ name, label, report_key }) => ({ label, report_key, preset: name }));
  const names = presets.map((preset) => preset.name);
  if (Object.keys(part).length === 0) {
    return { path: "full_report", request: { ...asked.fields, sections: names }, sections };
  }
  // A report has no moments; the prompts of a batch have.
  const prompts = names.map((preset) => ({ preset, ...part }));
  return { path: "generate_batch", request: { ...asked.fields, prompts }, sections };
}

async function ask() {
  const asked = song.read();
  const { path, request, sections } = compose(asked, questions.read());
  report = new Report(asked, sections);
  begin();
  const body = await client.ask(path, request, asked.file, running.signal);
  for await (const event of readEvents(body)) take(event);
  if (!report.totals) throw new ApiError(0, "The connection ended before the report was whole.");
}

function take(event) {
  if (event.name === "error") throw new ApiError(0, event.data.error.message);
  const index = report.take(event);
  if (index !== null) views.update(index);
  if (event.name === "answer") announceProgress();
  showTotals();
}

async function submit() {
  if (running) return;
  showAlert("");
  try {
    await ask();
    announce("Finished.");
  } catch (error) {
    explain(error);
  } finally {
    end();
  }
}

function explain(error) {
  if (error.name === "AbortError") {
    announce("Cancelled.");
    return;
  }
  showAlert(messageOf(error));
  if (error instanceof EntryError) {
    error.field.setAttribute("aria-invalid", "true");
    error.field.focus();
  }
  if (error.status === 401) {
    byId("key-details").open = true;
    byId("key").focus();
  }
}

function messageOf(error) {
  if (error instanceof EntryError) return error.message;
  if (!(error instanceof ApiError)) {
    console.error(error);
    return "The page has a fault; see the browser's console.";
  }
  if (error.status === 401 && !client.readKey()) return "This server asks for an API key.";
  const again = error.retryAfterSeconds ? ` Try again in ${error.retryAfterSeconds} s.` : "";
  return error.message + again;
}

// What is shown of a run.

let ticking = 0;

function begin() {
  running = new AbortController();
  startedAt = performance.now();
  ticking = setInterval(showTotals, 200);
  views.show(report);
  byId("progress").max = report.sections.length;
  byId("submit").disabled = true;
  byId("cancel").hidden = false;
  byId("cancel").focus();
  if (isNarrow.matches) byId("report").scrollIntoView();
  byId("running").hidden = false;
  byId("empty").hidden = true;
  showMeasured();
  showDownloads();
  showTotals();
  announce(`Asked; ${count(report.sections.length)} will fill in.`);
}

function end() {
  if (!running) return;
  clearInterval(ticking);
  running = null;
  report.stop();
  if (report.isEmpty) showNothing();
  else views.updateAll();
  const hadFocus = document.activeElement === byId("cancel");
  byId("cancel").hidden = true;
  byId("submit").disabled = false;
  if (hadFocus) byId("report-title").focus({ preventScroll: true });
  showMeasured();
  showDownloads();
  showTotals();
}

/** After a request that was refused, or cancelled before it said anything. */
function showNothing() {
  byId("answers").replaceChildren();
  byId("running").hidden = true;
  byId("empty").hidden = false;
}

function showTotals() {
  if (running) report.wallSeconds = (performance.now() - startedAt) / 1000;
  const numSections = report.sections.length;
  byId("progress").value = report.numFinished;
  byId("totals").textContent = [
    `${report.numFinished} of ${count(numSections)}`,
    seconds(report.wallSeconds),
    `billed ${seconds(report.billedSeconds)}`,
    dollars(report.costUsd),
  ].join(" · ");
}

function showMeasured() {
  const pairs = report.measured?.error
    ? [["Measured", report.measured.error.message]]
    : [...measurements(report.measured ?? {}), ...heard()];
  const rows = pairs.map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text)));
  byId("measured").replaceChildren(...rows);
  byId("measured").hidden = rows.length === 0;
}

/** What the model heard, where that is not the whole song. */
function heard() {
  const { audio } = report;
  if (!audio || audio.heard_seconds > audio.duration_seconds - 1) return [];
  const end = audio.start_seconds + audio.heard_seconds;
  return [["Heard", `${clock(audio.start_seconds)} to ${clock(end)}`]];
}

function showDownloads() {
  const isThere = !running && report.numFinished > 0;
  byId("markdown").hidden = !isThere;
  byId("json").hidden = !isThere;
}

function showAlert(text) {
  byId("alert").textContent = text;
  if (text) byId("alert").scrollIntoView({ block: "nearest" });
}

function announceProgress() {
  const { numFinished, sections } = report;
  const quarter = Math.ceil(sections.length / 4);
  if (numFinished % quarter === 0 && numFinished < sections.length) {
    announce(`${numFinished} of ${count(sections.length)} finished.`);
  }
}

/** For screen readers: said once they are silent. */
function announce(text) {
  byId("status").textContent = text;
}

function count(numSections) {
  return numSections === 1 ? "1 answer" : `${numSections} sections`;
}

// Downloads.

function download(text, type, suffix) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: `${fileName(report.song.name)}${suffix}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** "https://example.com/a%20b.mp3?c" → "a b" */
function fileName(name) {
  const path = URL.canParse(name) ? new URL(name).pathname : name;
  const last = path.split("/").pop().replaceAll("%20", " ");
  return last.replace(/\.[^.]*$/, "") || "song";
}

// The server.

async function loadPresets() {
  try {
    questions.offer(await client.presets());
    showAlert("");
  } catch (error) {
    explain(error);
    if (error.status !== 401) setTimeout(loadPresets, HEALTH_SECONDS * 1000);
  }
}

async function showHealth() {
  const health = await client.health().catch(() => null);
  const isReady = health?.status === "ok";
  const named = isReady ? `${health.model} on ${health.engine}` : `engine: ${health?.status}`;
  byId("server").textContent = health ? named : "no connection";
  byId("rate").textContent = health ? rate(health) : "";
  if (!isReady) setTimeout(showHealth, HEALTH_SECONDS * 1000);
}

function rate({ gpu_usd_per_second: usd, rate_source: source }) {
  return `· $${usd} per second${source === "fallback" ? ", a fallback rate" : ""}`;
}

byId("key").value = sessionStorage.getItem(KEY) ?? "";
byId("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, byId("key").value.trim());
  if (questions.presets.length === 0) loadPresets();
});
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // it keeps the key, and sends no song yet
  byId("key").dispatchEvent(new Event("change"));
});
byId("ask").addEventListener("input", (event) => event.target.removeAttribute("aria-invalid"));
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
byId("cancel").addEventListener("click", () => running?.abort());
byId("markdown").addEventListener("click", () => {
  download(toMarkdown(report), "text/markdown", "-report.md");
});
byId("json").addEventListener("click", () => {
  download(JSON.stringify(report, null, 2), "application/json", "-report.json");
});
showHealth();
loadPresets();

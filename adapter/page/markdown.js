/** A report as Markdown, in which the model's words are only ever words. */

import { clock, dollars, label, measurements, scalar, seconds } from "./format.js";
import { content } from "./report.js";

/** @param {import("./report.js").Report} report */
export function toMarkdown(report) {
  const blocks = [`# ${plain(report.song.name)}`, summary(report)];
  if (report.measured) blocks.push("## Measured", measuredList(report.measured));
  for (const section of report.sections) {
    blocks.push(`## ${plain(section.label)}`);
    if (section.answer?.disputed_by_measurement) {
      blocks.push("*Disputed by measurement: tempo or key differ from what was measured.*");
    }
    blocks.push(body(section));
  }
  return `${blocks.join("\n\n")}\n`;
}

/** Text that Markdown shows as it is, line by line. */
export function plain(text) {
  return String(text)
    .replace(/[\\`*_{}[\]<>#|~&!$]/g, "\\$&")
    .replace(/^(\s*)([-+](?=\s|$)|[-=]+(?=\s*$))/gm, "$1\\$2")
    .replace(/^(\s*\d+)([.)])(?=\s|$)/gm, "$1\\$2")
    .replace(/^[ \t]+/gm, "")
    .replace(/([^\n])\n(?=[^\n])/g, "$1  \n");
}

function summary(report) {
  const { song, totals } = report;
  const lines = [];
  if (song.startSeconds !== null || song.endSeconds !== null) {
    const end = song.endSeconds === null ? "the end" : clock(song.endSeconds);
    lines.push(`* Part: ${clock(song.startSeconds ?? 0)} to ${end}`);
  }
  if (totals) lines.push(`* Model: ${plain(totals.model)}`);
  lines.push(`* Billed: ${seconds(report.billedSeconds)}, ${dollars(report.costUsd)}`);
  return lines.join("\n");
}

function measuredList(measured) {
  if (measured.error) return `*Not measured: ${plain(measured.error.message)}*`;
  return measurements(measured).map(([name, text]) => `* ${name}: ${plain(text)}`).join("\n");
}

function body(section) {
  const value = content(section);
  if (!section.answer || section.answer.error) return `*No answer: ${plain(value.error.message)}*`;
  if (value !== null && typeof value === "object") return list(value, "");
  return plain(value);
}

function list(value, indent) {
  const isArray = Array.isArray(value);
  const entries = Object.entries(value);
  if (entries.length === 0) return `${indent}* –`;
  return entries.map(([field, inner]) => {
    const name = isArray ? "" : `**${plain(label(field))}:** `;
    if (inner === null || typeof inner !== "object") {
      return `${indent}* ${name}${plain(scalar(inner, field))}`;
    }
    if (Array.isArray(inner) && inner.every((one) => typeof one !== "object")) {
      return `${indent}* ${name}${plain(inner.map((one) => scalar(one, field)).join(", ") || "–")}`;
    }
    return `${indent}* ${name || plain(`${Number(field) + 1}`)}\n${list(inner, `${indent}  `)}`;
  }).join("\n");
}

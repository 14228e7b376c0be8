/** A report as it comes: what each section has so far, and what all of them cost. */

/** A section is waiting, writing, done, failed, or stopped (the stream ended before its answer). */
export class Report {
  /**
   * @param {{name: string, startSeconds: number | null, endSeconds: number | null}} song
   * @param {{label: string, report_key: string, preset: string | null}[]} asked
   */
  constructor(song, asked) {
    this.song = song;
    this.sections = asked.map((one) => ({ ...one, state: "waiting", text: "", answer: null }));
    this.measured = null;
    this.totals = null;
  }

  /** Take in one event of the stream; the index of the section that it changed, or null. */
  take({ name, data }) {
    if (name === "done") return this.finish(data);
    const section = this.sections[data.index];
    if (!section) return null;
    if (name === "delta") {
      section.text += data.text;
      section.state = "writing";
    } else if (name === "restart") {
      section.text = "";
      section.state = "waiting";
    } else if (name === "answer") {
      section.answer = data;
      section.state = data.error ? "failed" : "done";
    }
    return data.index;
  }

  finish({ report, ...totals }) {
    this.totals = totals;
    this.measured = report?.measured ?? null;
    return null;
  }

  /** The stream is over: what has no answer will get none. */
  stop() {
    for (const section of this.sections) {
      if (!section.answer) section.state = "stopped";
    }
  }

  get isEmpty() {
    return this.sections.every((section) => !section.answer && !section.text);
  }

  get numFinished() {
    return this.sections.filter((section) => section.answer).length;
  }

  get billedSeconds() {
    return this.totals?.elapsed_seconds ?? this.sum("elapsed_seconds");
  }

  get costUsd() {
    return this.totals?.cost_usd ?? this.sum("cost_usd");
  }

  /** What any answer says of the song as the model heard it, or null. */
  get audio() {
    return this.sections.find((section) => section.answer?.audio)?.answer.audio ?? null;
  }

  sum(field) {
    return this.sections.reduce((sum, section) => sum + (section.answer?.[field] ?? 0), 0);
  }

  /** The body of the unstreamed answer, and what was asked about. */
  toJSON() {
    const { name, startSeconds, endSeconds } = this.song;
    const report = Object.fromEntries(
      this.sections.map((section) => [section.report_key, content(section)]),
    );
    if (this.measured) report.measured = this.measured;
    return {
      song: { name, start_seconds: startSeconds, end_seconds: endSeconds },
      complete: this.totals !== null,
      report,
      sections: this.sections.map(described),
      elapsed_seconds: this.billedSeconds,
      cost_usd: this.costUsd,
      ...this.totals,
    };
  }
}

/** A section's data or text; an error where it has neither. */
export function content({ answer }) {
  if (!answer) return { error: { code: "cancelled", message: "It was stopped.", field: null } };
  if (answer.error) return { error: answer.error };
  return answer.data ?? answer.response;
}

function described({ report_key, preset, text, answer }) {
  const { index, ...said } = answer ?? { response: text };
  return { report_key, preset, ...said };
}

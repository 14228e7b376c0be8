/** The song that is asked about, and which part of it. */

import { byId } from "./dom.js";
import { clock, parseClock } from "./format.js";
import { Waveform } from "./waveform.js";

const HINTS = {
  waveform: "Drag over the waveform, or type minutes and seconds. Empty is the whole song.",
  fields: "Type minutes and seconds. Empty is the whole song.",
};

/** What is wrong with what was entered; `field` is where to mend it. */
export class EntryError extends Error {
  /** @param {HTMLElement} field */
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export class SongForm {
  constructor() {
    this.file = null;
    this.waveform = new Waveform(
      byId("waveform"),
      (start, end) => this.pick(start, end),
      (isPlaying) => this.showPlaying(isPlaying),
    );
    byId("file").addEventListener("change", () => this.choose(byId("file").files[0]));
    byId("remove").addEventListener("click", () => this.remove());
    byId("play").addEventListener("click", () => this.waveform.toggle());
    byId("whole").addEventListener("click", () => this.pickWhole());
    byId("url").addEventListener("input", () => this.show());
    for (const id of ["start", "end"]) byId(id).addEventListener("input", () => this.showPart());
    this.takeDrops();
  }

  /**
   * The song as a request names it.
   * @returns {{name: string, file: File | null, fields: object, startSeconds: number | null, endSeconds: number | null}}
   * @throws {EntryError}
   */
  read() {
    const url = byId("url").value.trim();
    if (!this.file && !url) throw new EntryError("Choose a song first.", byId("file"));
    if (!this.file && !/^https?:\/\/./i.test(url)) {
      throw new EntryError("The address has to start with http:// or https://.", byId("url"));
    }
    const name = this.file?.name ?? url;
    return { name, file: this.file, fields: this.file ? {} : { audio_url: url }, ...this.readPart() };
  }

  readPart() {
    const [startSeconds, endSeconds] = ["start", "end"].map((id) => {
      const value = parseClock(byId(id).value);
      if (!Number.isNaN(value)) return value;
      throw new EntryError("A time looks like 1:15 or 75.5.", byId(id));
    });
    if (endSeconds !== null && (startSeconds ?? 0) >= endSeconds) {
      throw new EntryError("The part has to end after it starts.", byId("end"));
    }
    return { startSeconds, endSeconds };
  }

  async choose(file) {
    if (!file) return;
    this.file = file;
    this.pickWhole();
    byId("song-name").textContent = file.name;
    byId("song-length").textContent = "";
    this.note("Drawing the waveform…");
    byId("play").disabled = true;
    this.show();
    try {
      const durationSeconds = await this.waveform.load(file);
      if (this.file !== file) return;
      byId("song-length").textContent = clock(Math.round(durationSeconds));
      byId("play").disabled = false;
      this.note("");
      this.showPart();
    } catch {
      if (this.file !== file) return;
      this.waveform.clear();
      this.note("This browser cannot play the file, so there is no waveform. The server may know it all the same.");
    }
  }

  remove() {
    this.file = null;
    byId("file").value = "";
    this.waveform.clear();
    this.pickWhole();
    this.show();
    byId("file").focus();
  }

  pick(startSeconds, endSeconds) {
    byId("start").value = clock(startSeconds);
    byId("end").value = clock(endSeconds);
    this.showPart();
  }

  pickWhole() {
    byId("start").value = "";
    byId("end").value = "";
    this.showPart();
  }

  showPart() {
    const [start, end] = ["start", "end"].map((id) => parseClock(byId(id).value));
    byId("whole").hidden = start === null && end === null;
    if (!Number.isNaN(start) && !Number.isNaN(end)) this.waveform.setPart(start, end);
  }

  show() {
    const hasFile = this.file !== null;
    byId("drop").hidden = hasFile;
    byId("address").hidden = hasFile;
    byId("chosen").hidden = !hasFile;
    byId("part").hidden = !hasFile && byId("url").value.trim() === "";
    byId("part-hint").textContent = hasFile ? HINTS.waveform : HINTS.fields;
  }

  showPlaying(isPlaying) {
    byId("play").setAttribute("aria-label", isPlaying ? "Pause" : "Play");
    byId("play").classList.toggle("playing", isPlaying);
  }

  note(text) {
    byId("waveform-note").textContent = text;
    byId("waveform-note").hidden = text === "";
  }

  /** A song may be dropped anywhere: beside the marked place the browser would open it. */
  takeDrops() {
    const mark = (isOver) => byId("drop").classList.toggle("over", isOver);
    document.addEventListener("dragover", (event) => {
      event.preventDefault();
      mark(true);
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) mark(false);
    });
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      mark(false);
      this.choose(event.dataTransfer.files[0]);
    });
  }
}

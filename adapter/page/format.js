/** Numbers and names as people read them. */

/** 75.5 → "1:15.5", 3600 → "1:00:00"; tenths only where they are not 0. */
export function clock(seconds) {
  const tenths = Math.round(seconds * 10);
  const rest = (tenths % 600) / 10;
  const minutes = Math.floor(tenths / 600);
  const tail = (rest < 10 ? "0" : "") + rest;
  if (minutes < 60) return `${minutes}:${tail}`;
  return `${Math.floor(minutes / 60)}:${String(minutes % 60).padStart(2, "0")}:${tail}`;
}

/** "1:15.5" or "75.5" → 75.5; "" → null; NaN where it is no time. */
export function parseClock(text) {
  const trimmed = text.trim().replace(",", ".");
  if (trimmed === "") return null;
  if (!/^(\d+:){0,2}\d+(\.\d*)?$/.test(trimmed)) return NaN;
  return trimmed.split(":").reduce((sum, number) => sum * 60 + Number(number), 0);
}

export function seconds(value) {
  return `${value < 100 ? value.toFixed(1) : Math.round(value)} s`;
}

export function dollars(value) {
  if (value > 0 && value < 0.00005) return "< $0.0001";
  return `$${value.toFixed(value < 1 ? 4 : 2)}`;
}

const ABBREVIATIONS = new Set(["bpm", "lufs", "url", "id"]);

/** A field's name as a label: "best_moment_seconds" → "Best moment". */
export function label(field) {
  const words = field.replace(/_seconds$/, "").split("_");
  const shown = words.map((word) => (ABBREVIATIONS.has(word) ? word.toUpperCase() : word));
  const text = shown.join(" ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** A number, a boolean, a string or null as text; a field that ends in _seconds is a moment. */
export function scalar(value, field = "") {
  if (value === null || value === "") return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number" && field.endsWith("_seconds")) return clock(value);
  return String(value);
}

/** What was measured of a song, as pairs of a label and a text. */
export function measurements(measured) {
  const pairs = [];
  const add = (name, value, text) => value != null && pairs.push([name, text(value)]);
  add("Duration", measured.duration_seconds, (value) => clock(Math.round(value)));
  add("Tempo", measured.tempo_bpm, (value) => `${value.toFixed(1)} BPM`);
  add("Key", measured.key, (value) => [value, measured.mode].filter(Boolean).join(" "));
  add("Key strength", measured.key_strength, (value) => value.toFixed(2));
  add("Loudness", measured.loudness_lufs, (value) => `${value.toFixed(1)} LUFS`);
  return pairs;
}

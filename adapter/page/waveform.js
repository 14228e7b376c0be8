/** The song's waveform, on which a part of it is picked. */

import Regions from "./vendor/regions.esm.js";
import WaveSurfer from "./vendor/wavesurfer.esm.js";

const HEIGHT_PIXELS = 112; // the Content-Security-Policy allows wavesurfer's style of this height
const SHORTEST_PART_SECONDS = 0.2;

export class Waveform {
  /**
   * @param {HTMLElement} container
   * @param {(startSeconds: number, endSeconds: number) => void} onPart when a part was picked
   * @param {(isPlaying: boolean) => void} onPlaying
   */
  constructor(container, onPart, onPlaying) {
    this.container = container;
    this.onPart = onPart;
    this.onPlaying = onPlaying;
    this.surfer = null;
    this.regions = null;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.surfer?.setOptions(this.colors());
    });
  }

  /**
   * Show a song.
   * @param {File} file
   * @returns {Promise<number>} its duration in seconds
   * @throws {Error} where the browser cannot decode it
   */
  async load(file) {
    this.clear();
    const regions = Regions.create();
    const surfer = WaveSurfer.create({
      container: this.container,
      height: HEIGHT_PIXELS,
      barWidth: 2,
      barGap: 2,
      barRadius: 2,
      cursorWidth: 2,
      normalize: true,
      hideScrollbar: true,
      plugins: [regions],
      ...this.colors(),
    });
    this.surfer = surfer;
    this.regions = regions;
    surfer.on("play", () => this.onPlaying(true));
    surfer.on("pause", () => this.onPlaying(false));
    surfer.on("finish", () => this.onPlaying(false));
    regions.on("region-created", (region) => this.keepOnly(region));
    regions.on("region-updated", (region) => this.onPart(region.start, region.end));
    // It says so in an event alone where the audio element cannot play the file.
    const failed = new Promise((_, reject) => surfer.once("error", reject));
    await Promise.race([surfer.loadBlob(file), failed]);
    regions.enableDragSelection({ color: this.color("--part"), minLength: SHORTEST_PART_SECONDS });
    return surfer.getDuration();
  }

  clear() {
    this.surfer?.destroy();
    this.surfer = null;
    this.regions = null;
    this.onPlaying(false);
  }

  /** Show a part, or with `null` the whole song; tells nobody. */
  setPart(startSeconds, endSeconds) {
    if (!this.surfer?.getDuration()) return;
    const part = { start: startSeconds ?? 0, end: endSeconds ?? this.surfer.getDuration() };
    const [region] = this.regions.getRegions();
    if (startSeconds === null && endSeconds === null) this.regions.clearRegions();
    else if (part.start >= part.end) return;
    else if (region) region.setOptions(part);
    else this.silently(() => this.regions.addRegion({ ...part, color: this.color("--part") }));
  }

  /** Play or pause; where a part is picked, it alone is played. */
  toggle() {
    if (!this.surfer) return;
    const [region] = this.regions.getRegions();
    if (this.surfer.isPlaying()) this.surfer.pause();
    else if (region) region.play(true);
    else this.surfer.play();
  }

  keepOnly(region) {
    for (const other of this.regions.getRegions()) {
      if (other !== region) other.remove();
    }
    if (!this.silent) this.onPart(region.start, region.end);
  }

  silently(act) {
    this.silent = true;
    act();
    this.silent = false;
  }

  colors() {
    return {
      waveColor: this.color("--wave"),
      progressColor: this.color("--accent"),
      cursorColor: this.color("--text"),
    };
  }

  color(name) {
    return getComputedStyle(this.container).getPropertyValue(name).trim();
  }
}

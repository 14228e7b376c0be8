/** The server's API, at addresses relative to the page. */

/** What the server refused, in its own words. */
export class ApiError extends Error {
  /**
   * @param {number} status 0 where there was no answer
   * @param {string} message says what to do
   * @param {number | null} retryAfterSeconds
   */
  constructor(status, message, retryAfterSeconds = null) {
    super(sentence(message));
    this.status = status;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

export class Client {
  /** @param {() => string} readKey gives the API key, or "" */
  constructor(readKey) {
    this.readKey = readKey;
  }

  /** The server's state, also where it cannot answer yet. */
  async health() {
    const response = await send("health", {});
    return response.json();
  }

  /** @throws {ApiError} */
  async presets() {
    const response = await send("presets", { headers: this.headers() });
    await refuse(response);
    return (await response.json()).presets;
  }

  /**
   * The body of a streamed answer.
   * @param {string} path
   * @param {object} request the request's JSON
   * @param {File | null} file the song, where it is not in the request
   * @param {AbortSignal} signal closes the stream, which stops the work
   * @returns {Promise<ReadableStream<Uint8Array>>}
   * @throws {ApiError}
   */
  async ask(path, request, file, signal) {
    const json = JSON.stringify({ ...request, stream: true });
    const headers = this.headers();
    if (!file) headers["Content-Type"] = "application/json";
    const body = file ? asForm(json, file) : json;
    const response = await send(path, { method: "POST", headers, body, signal });
    await refuse(response);
    return response.body;
  }

  headers() {
    const key = this.readKey();
    return key ? { Authorization: `Bearer ${key}` } : {};
  }
}

function asForm(json, file) {
  const form = new FormData();
  form.append("request", json);
  form.append("audio", file);
  return form;
}

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Check the connection and try again.");
  }
}

async function refuse(response) {
  if (response.ok) return;
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const told = await response.json().catch(() => ({}));
  const message = told.error?.message ?? `the server answered ${response.status}`;
  throw new ApiError(response.status, message, retryAfter);
}

function sentence(text) {
  const end = /[.?!]$/.test(text) ? "" : ".";
  return text.charAt(0).toUpperCase() + text.slice(1) + end;
}

/** Server-sent events over fetch, which can POST where EventSource cannot. */

import { ApiError } from "./client.js";

/**
 * The events of a response's body, in order; comments (heartbeats) are passed over.
 * @param {ReadableStream<Uint8Array>} body
 * @yields {{name: string, data: any}} the event's name and its parsed JSON
 * @throws {ApiError} where the connection breaks
 */
export async function* readEvents(body) {
  let name = "message";
  let data = [];
  for await (const line of readLines(body)) {
    if (line === "") {
      if (data.length > 0) yield { name, data: JSON.parse(data.join("\n")) };
      name = "message";
      data = [];
    } else if (line.startsWith("event:")) {
      name = line.slice(6).trim();
    } else if (line.startsWith("data:")) {
      data.push(line.slice(5).trimStart());
    }
  }
}

async function* readLines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(fail);
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) yield line.replace(/\r$/, "");
    }
  } finally {
    await reader.cancel().catch(() => {}); // whoever reads no further wants no more of it
  }
}

function fail(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, "The connection ended before the report was whole.");
}

// The server's API: JSON, and responses streamed as server-sent events. Independent of the page.

/** An error response: the server's message, and the invalid field if there is one. */
export class ApiError extends Error {
  constructor(status, message, param) {
    super(param ? `${param}: ${message}` : message);
    this.status = status;
  }
}

async function failure(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    if (typeof error === "string") return new ApiError(response.status, error);
    return new ApiError(response.status, error.message, error.param);
  } catch {
    return new ApiError(response.status, text || response.statusText);
  }
}

export async function getJson(path, signal) {
  const response = await fetch(path, { signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/** Send a form, and return the JSON of the answer. */
export async function postForm(path, fields, signal) {
  const body = new FormData();
  for (const [name, value] of Object.entries(fields)) body.append(name, value);
  const response = await fetch(path, { method: "POST", body, signal });
  if (!response.ok) throw await failure(response);
  return response.json();
}

/**
 * Yield each event of a streamed answer: its JSON, and its text, in which large integers are exact.
 *
 * An `error` in the middle of a stream is thrown like any other; a stream that ends without its `[DONE]` is one too.
 */
export async function* streamJson(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failure(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.code, chunk.error.message, chunk.error.param);
    yield { chunk, text: data };
  }
  throw new ApiError(0, "the connection ended before the answer did");
}

/** Yield the data of each event. Lines that start with a colon are keep-alive comments. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split(/\r?\n\r?\n/);
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

// The server: its models, completions as a stream of chunks, its errors, the key.

const KEY = "slipstream.key";
const NUM_COMPLETED = 128; // tokens, where the settings name no number

// What the server refused, in its words; `param` is the field that is wrong, or null.
export class ServerError extends Error {
  constructor({ message, param = null, code = null, type = null }, status = null) {
    super(message);
    Object.assign(this, { param, code, type, status });
  }
}

export class Api {
  // `askForKey(reason)` resolves to a key, or to null where none is given.
  constructor(askForKey) {
    this.askForKey = askForKey;
  }

  async changeKey(reason) {
    const key = await this.askForKey(reason);
    if (key === null) return false;
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
    return true;
  }

  async models() {
    const response = await this.#fetch("v1/models", {});
    const { data } = await response.json();
    // A model may have several names: the first one stands for all.
    return data.filter(
      ({ id, root }) => !root || root === id || !data.some((one) => one.id === root),
    );
  }

  // Yields the chunks of a chat completion. An abort of the signal closes the connection, which
  // is what cancels the request on the server.
  chat(body, signal) {
    return this.#stream("v1/chat/completions", body, signal);
  }

  // Yields the chunks of a completion of `prompt`, in the form of a chat's.
  async *complete(prompt, { messages, logprobs, top_logprobs: top, ...body }, signal) {
    const own = { max_tokens: NUM_COMPLETED, ...body, prompt, ...(logprobs && { logprobs: top }) };
    for await (const chunk of this.#stream("v1/completions", own, signal)) {
      yield { ...chunk, choices: chunk.choices.map(asChat) };
    }
  }

  async *#stream(path, body, signal) {
    const response = await this.#fetch(path, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error);
      yield chunk;
    }
    throw new ServerError({
      message: "The server ended the stream before the answer was complete.",
    });
  }

  async #fetch(path, options) {
    for (;;) {
      const key = sessionStorage.getItem(KEY);
      const headers = { ...options.headers, ...(key && { authorization: `Bearer ${key}` }) };
      const response = await reach(path, { ...options, headers });
      if (response.ok) return response;
      const error = await refusal(response);
      if (response.status !== 401 || !(await this.changeKey(key ? error.message : ""))) throw error;
    }
  }
}

// A choice of a completion as one of a chat.
function asChat({ text, logprobs, ...choice }) {
  const content = logprobs?.tokens.map((token, at) => ({
    token,
    logprob: logprobs.token_logprobs[at],
    top_logprobs: Object.entries(logprobs.top_logprobs?.[at] ?? {}).map(([token, logprob]) => ({
      token,
      logprob,
    })),
  }));
  return { ...choice, delta: { content: text }, logprobs: content && { content } };
}

async function reach(path, options) {
  try {
    return await fetch(new URL(path, document.baseURI), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError({ message: "The server cannot be reached.", code: error.message });
  }
}

// A stream that the user has not aborted breaks off.
function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new ServerError({ message: "The connection to the server is lost.", code: error.message });
}

async function refusal(response) {
  const text = await response.text();
  try {
    return new ServerError(JSON.parse(text).error, response.status);
  } catch {
    return new ServerError({ message: text || response.statusText }, response.status);
  }
}

// Yields the data of each server-sent event; comments, which keep the connection open, have none.
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(lost);
      if (done) return;
      const blocks = (rest + value.replaceAll("\r", "")).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

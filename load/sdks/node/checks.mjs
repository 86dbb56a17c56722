// What the checks of the JavaScript SDKs share: options, prompts, forced answers, the loop.

import assert from "node:assert/strict";
import { parseArgs } from "node:util";

const { values } = parseArgs({
  options: {
    url: { type: "string" },
    "plain-url": { type: "string" }, // of a gateway without reasoning, for calls that must come
    model: { type: "string" },
    "api-key": { type: "string", default: "none" },
    tools: { type: "boolean", default: false }, // the model calls tools when it must
    only: { type: "string", default: "" },
  },
});

export const url = values.url;
export const plain = values["plain-url"] ?? values.url;
export const model = values.model;
export const key = values["api-key"];
export const hasTools = values.tools;
export const prompt = "Write one sentence about the sea.";
export const code = "import os\n\n\ndef main(";
export const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
// A small model writes calls and reasoning only where a guide says so.
const form =
  '<tool_call>\\{"name": "get_weather", "arguments": \\{"city": "[A-Z][a-z]{2,8}"\\}\\}</tool_call>';
export const call = { structured_outputs: { regex: form } };
export const calls = { structured_outputs: { regex: `[a-z]{3,9}${form}\\n${form}` } };
export const think = { structured_outputs: { regex: "<think>[a-z ]{3,20}</think>[a-z]{3,9}" } };

/** Wait until the server has no request in flight. */
export async function waitIdle(seconds = 20) {
  const start = Date.now();
  for (;;) {
    const answer = await fetch(`${url}/load`, { headers: { authorization: `Bearer ${key}` } });
    const { server_load: load } = await answer.json();
    if (load === 0) return;
    assert(Date.now() - start < seconds * 1000, `${load} requests are in flight still`);
    await new Promise((resume) => setTimeout(resume, 50));
  }
}

/** Return what an async iterable yields. */
export async function all(iterable) {
  const found = [];
  for await (const each of iterable) found.push(each);
  return found;
}

/** Run checks, print a line for each, and set the exit status. */
export async function run(checks) {
  for (const [name, check] of Object.entries(checks)) {
    if (!name.includes(values.only)) continue;
    const start = performance.now();
    try {
      const found = await check();
      const seconds = ((performance.now() - start) / 1000).toFixed(2);
      const shown = found === undefined ? "" : `: ${found}`.replace(/\s+/g, " ").slice(0, 200);
      console.log(`pass ${name} (${seconds} s)${shown}`);
    } catch (error) {
      const at = (error.stack ?? "").match(/\w+\.mjs:\d+/g)?.slice(0, 3).join(", ");
      const message = `${error.name}: ${error.message}`.replace(/\s+/g, " ").slice(0, 300);
      console.log(`FAIL ${name}: ${message} (${at})`);
      process.exitCode = 1;
    }
  }
}

// Checks of Vercel's AI SDK, by its providers openai-compatible and openai.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, jsonSchema, streamText, tool } from "ai";
import { z } from "zod";
import * as c from "./checks.mjs";

const settings = { baseURL: `${c.url}/v1`, apiKey: c.key };
/** Return a provider whose requests also have fields that the SDK does not know. */
function compatible(extra = {}, url = c.url) {
  return createOpenAICompatible({
    name: "slipstream",
    ...settings,
    baseURL: `${url}/v1`,
    includeUsage: true,
    supportsStructuredOutputs: true,
    transformRequestBody: (body) => ({ ...body, ...extra }),
  });
}
const openai = createOpenAI(settings);
const plain = createOpenAI({ ...settings, baseURL: `${c.plain}/v1` });
const single = { parallel_tool_calls: false };
const forced = {
  "openai-compatible": compatible(single, c.plain).chatModel(c.model),
  "openai.chat": plain.chat(c.model),
  "openai.responses": plain.responses(c.model),
};
const models = {
  "openai-compatible": compatible().chatModel(c.model),
  "openai.chat": openai.chat(c.model),
  "openai.responses": openai.responses(c.model),
};
const fixed = { prompt: c.prompt, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };
const Answer = z.object({ is_wet: z.boolean(), depth: z.number().int().min(0).max(99) });
const weather = tool({
  description: "Get the weather",
  inputSchema: jsonSchema(c.parameters),
  execute: async ({ city }) => `sunny in ${city}`,
});
const tools = { get_weather: weather };
const strict = { get_weather: { ...weather, strict: true } }; // the arguments follow the schema

const checks = {};
for (const [name, model] of Object.entries(models)) {
  checks[`${name}: generateText`] = async () => {
    const answer = await generateText({ model, ...fixed });
    assert(answer.text);
    assert(answer.usage.outputTokens > 0 && answer.usage.inputTokens > 0);
    return JSON.stringify(answer.text.slice(0, 40));
  };
  checks[`${name}: streamText equals generateText`] = async () => {
    const whole = await generateText({ model, ...fixed });
    const stream = streamText({ model, ...fixed });
    assert.equal((await c.all(stream.textStream)).join(""), whole.text);
    assert.equal(await stream.finishReason, whole.finishReason);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  };
  checks[`${name}: output by a zod schema`] = async () => {
    const output = Output.object({ schema: Answer });
    const answer = await generateText({ model, ...fixed, maxOutputTokens: 100, output });
    Answer.parse(answer.output);
    const stream = streamText({ model, ...fixed, maxOutputTokens: 100, output });
    Answer.parse(await stream.output);
    return JSON.stringify(answer.output);
  };
  checks[`${name}: errors`] = async () => {
    const error = await generateText({ model, ...fixed, topP: 2 }).catch((caught) => caught);
    assert(APICallError.isInstance(error), `${error}`);
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /top_p is 2/);
    return error.message;
  };
  checks[`${name}: abort`] = async () => {
    const abort = new AbortController();
    const stream = streamText({ model, ...fixed, maxOutputTokens: 1500, abortSignal: abort.signal });
    for await (const _ of stream.textStream) abort.abort();
    await c.waitIdle();
  };
  if (c.hasTools) {
    checks[`${name}: toolChoice required`] = async () => {
      const options = { model: forced[name], ...fixed, tools: strict, maxOutputTokens: 300 };
      options.toolChoice = "required";
      options.providerOptions = { openai: { parallelToolCalls: false } };
      const answer = await generateText(options);
      assert(answer.toolCalls[0].input.city);
      assert.match(`${answer.toolResults[0].output}`, /sunny in/);
      const stream = streamText(options);
      assert.deepEqual((await stream.toolCalls)[0].input, answer.toolCalls[0].input);
      return JSON.stringify(answer.toolCalls[0].input);
    };
  }
}
checks["openai-compatible: calls of tools, streamed and not"] = async () => {
  const options = { ...fixed, model: compatible(c.calls).chatModel(c.model), tools, maxOutputTokens: 200 };
  const answer = await generateText(options);
  assert.equal(answer.finishReason, "tool-calls");
  assert.deepEqual(answer.toolCalls.map(({ toolName }) => toolName), ["get_weather", "get_weather"]);
  assert.match(`${answer.toolResults[0].output}`, /sunny in/);
  const stream = streamText(options);
  const inputs = (found) => found.map(({ input }) => input);
  assert.deepEqual(inputs(await stream.toolCalls), inputs(answer.toolCalls));
  assert.equal(await stream.text, answer.text);
  return JSON.stringify(inputs(answer.toolCalls));
};
checks["openai-compatible: reasoning, streamed and not"] = async () => {
  const options = { ...fixed, model: compatible(c.think).chatModel(c.model), maxOutputTokens: 100 };
  const answer = await generateText(options);
  assert(answer.reasoningText);
  assert(!answer.text.includes("think"));
  const stream = streamText(options);
  assert.equal(await stream.text, answer.text);
  assert.equal(await stream.reasoningText, answer.reasoningText);
  return JSON.stringify(answer.reasoningText);
};
checks["completion models"] = async () => {
  const prompt = c.code;
  for (const model of [compatible().completionModel(c.model), openai.completion(c.model)]) {
    const answer = await generateText({ model, ...fixed, prompt });
    const stream = streamText({ model, ...fixed, prompt });
    assert.equal((await c.all(stream.textStream)).join(""), answer.text);
  }
};
await c.run(checks);

// Checks of openai's SDK for JavaScript: chat completions, completions, errors, cancels.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as c from "./checks.mjs";

const client = new OpenAI({ baseURL: `${c.url}/v1`, apiKey: c.key, maxRetries: 0 });
const messages = [{ role: "user", content: c.prompt }];
const fixed = { model: c.model, temperature: 0, max_tokens: 24 };
const called = { name: "get_weather", parameters: c.parameters };
const tools = [{ type: "function", function: called }];
const Answer = z.object({ is_wet: z.boolean(), depth: z.number().int().min(0).max(99) });
const create = (body, options) => client.chat.completions.create({ messages, ...fixed, ...body }, options);

const checks = {
  async chat() {
    const answer = await create({});
    assert(answer.choices[0].message.content);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
    return JSON.stringify(answer.choices[0].message.content.slice(0, 40));
  },
  async "chat, streamed, equals chat"() {
    const whole = await create({});
    const chunks = await c.all(await create({ stream: true, stream_options: { include_usage: true } }));
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(chunks.at(-1).choices, []);
    assert.equal(chunks.at(-1).usage.completion_tokens, whole.usage.completion_tokens);
    return `${chunks.length} chunks`;
  },
  async "chat.completions.stream() folds to the whole"() {
    const whole = await create({});
    const stream = client.chat.completions.stream({ messages, ...fixed });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(final.choices[0].message.content, text);
  },
  async "n and log probs"() {
    const answer = await create({ n: 2, logprobs: true, top_logprobs: 2 });
    assert.equal(answer.choices.length, 2);
    assert.equal(answer.choices[1].logprobs.content[0].top_logprobs.length, 2);
  },
  async "parse(), json_schema by zod"() {
    const format = zodResponseFormat(Answer, "answer");
    const answer = await client.chat.completions.parse({
      messages, ...fixed, max_tokens: 100, response_format: format,
    });
    const { parsed } = answer.choices[0].message;
    Answer.parse(parsed);
    return JSON.stringify(parsed);
  },
  async "calls of tools, streamed and not"() {
    const body = { ...c.calls, tools, max_tokens: 200 };
    const whole = (await create(body)).choices[0];
    assert.equal(whole.finish_reason, "tool_calls");
    assert.equal(whole.message.tool_calls.length, 2);
    const stream = client.chat.completions.stream({ messages, ...fixed, ...body });
    const folded = (await stream.finalChatCompletion()).choices[0];
    assert.equal(folded.message.content, whole.message.content);
    assert.deepEqual(
      folded.message.tool_calls.map(({ function: f }) => [f.name, f.arguments]),
      whole.message.tool_calls.map(({ function: f }) => [f.name, f.arguments]),
    );
    assert.equal(folded.finish_reason, "tool_calls");
    return whole.message.tool_calls[0].function.arguments;
  },
  async "runTools() calls a function"() {
    const cities = [];
    const get = { ...called, parse: JSON.parse, function: ({ city }) => (cities.push(city), "sunny") };
    const runner = client.chat.completions.runTools(
      { messages, ...fixed, ...c.call, max_tokens: 200, tools: [{ type: "function", function: get }] },
      { maxChatCompletions: 2 },
    );
    await runner.done().catch(() => undefined); // the guide forces a call in each turn
    assert(cities.length >= 1);
    return cities.join(" ");
  },
  async "reasoning fields"() {
    const { message } = (await create({ ...c.think, max_tokens: 100 })).choices[0];
    assert(message.reasoning);
    assert.equal(message.reasoning, message.reasoning_content);
    assert(!message.content.includes("think"));
  },
  async "completions, streamed and not"() {
    const whole = await client.completions.create({ prompt: c.code, ...fixed });
    const stream = await client.completions.create({ prompt: c.code, ...fixed, stream: true });
    const text = (await c.all(stream)).map((chunk) => chunk.choices[0].text).join("");
    assert.equal(text, whole.choices[0].text);
  },
  async models() {
    const found = (await c.all(client.models.list())).map(({ id }) => id);
    assert(found.includes(c.model));
    await assert.rejects(client.models.retrieve("none"), OpenAI.NotFoundError);
    return found.join(", ");
  },
  async "embeddings refused"() {
    const asked = client.embeddings.create({ model: c.model, input: "x" });
    await assert.rejects(asked, OpenAI.BadRequestError);
  },
  async errors() {
    for (const [name, value] of [["temperature", -1], ["n", 0], ["stop", [1]], ["top_logprobs", 99]]) {
      for (const stream of [false, true]) {
        const error = await create({ [name]: value, stream }).catch((caught) => caught);
        assert(error instanceof OpenAI.BadRequestError, name);
        assert.equal(error.param, name);
        assert.equal(error.type, "invalid_request_error");
      }
    }
    const long = [{ role: "user", content: "x ".repeat(9000) }];
    const error = await create({ messages: long }).catch((caught) => caught);
    assert.equal(error.code, "context_length_exceeded");
    const wrong = new OpenAI({ baseURL: `${c.url}/v1`, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(c.all(wrong.models.list()), OpenAI.AuthenticationError);
  },
  async "429, with and without retries"() {
    const body = { ignore_eos: true, max_tokens: 40 };
    const flood = (maxRetries) =>
      Promise.allSettled(Array.from({ length: 24 }, () => create(body, { maxRetries })));
    const refused = (await flood(0)).filter(({ status }) => status === "rejected");
    assert(refused.length > 0, "the queue took all requests");
    for (const { reason } of refused) assert(reason instanceof OpenAI.RateLimitError, reason);
    await c.waitIdle();
    const answers = await flood(30);
    for (const { status, reason } of answers) assert.equal(status, "fulfilled", reason?.message);
    return `${refused.length} refused, then ${answers.length} served`;
  },
  async "timeout, cancel in mid-stream"() {
    const body = { ignore_eos: true, max_tokens: 1500 };
    await assert.rejects(create(body, { timeout: 500 }), OpenAI.APIConnectionTimeoutError);
    await c.waitIdle();
    for await (const _ of await create({ ...body, stream: true })) break;
    await c.waitIdle();
    const stream = client.chat.completions.stream({ messages, ...fixed, ...body });
    setTimeout(() => stream.abort(), 300);
    await assert.rejects(stream.done(), OpenAI.APIUserAbortError);
    await c.waitIdle();
  },
};
if (c.hasTools) {
  checks["tool_choice required and named"] = async () => {
    const named = { type: "function", function: { name: "get_weather" } };
    for (const tool_choice of ["required", named]) {
      const plain = client.withOptions({ baseURL: `${c.plain}/v1` }).chat.completions;
      const body = { messages, ...fixed, tools, tool_choice, max_tokens: 300, parallel_tool_calls: false };
      const { message } = (await plain.create(body)).choices[0];
      assert(JSON.parse(message.tool_calls[0].function.arguments).city);
    }
  };
}
await c.run(checks);

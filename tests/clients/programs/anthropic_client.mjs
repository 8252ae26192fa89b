// Anthropic's package for Node: messages whole and streamed, tools, counting, errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { baseUrl, checkWeather, exercised, model, question, weather } from "./program.mjs";

const client = new Anthropic({ baseURL: baseUrl, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: question }];
const ask = { model, messages, system: "Be brief.", max_tokens: 12, temperature: 0 };

const whole = await client.messages.create(ask);
const stream = client.messages.stream(ask);
let text = "";
stream.on("text", (part) => (text += part));
assert.deepEqual((await stream.finalMessage()).content, whole.content);
assert.equal(text, whole.content[0].text);
exercised("messages");

const tools = [{ name: "weather", input_schema: weather }];
const forced = { ...ask, max_tokens: 200, tools, tool_choice: { type: "tool", name: "weather" } };
const called = await client.messages.stream(forced).finalMessage();
const use = called.content.find((block) => block.type === "tool_use");
checkWeather(use.input);
const result = { role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: "rain" }] };
const history = [...messages, { role: "assistant", content: called.content }, result];
assert.equal((await client.messages.create({ ...ask, messages: history, tools })).role, "assistant");
exercised("tools");

assert((await client.messages.countTokens({ model, messages })).input_tokens > 0);
exercised("count_tokens");

await assert.rejects(client.messages.create({ ...ask, temperature: -1 }), Anthropic.BadRequestError);
exercised("errors");

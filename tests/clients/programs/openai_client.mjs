// The `openai` package for Node: chat and responses, whole, streamed and parsed, tools.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { baseUrl, checkWeather, exercised, model, question, weather } from "./program.mjs";

const client = new OpenAI({ baseURL: `${baseUrl}/v1`, apiKey: "none", maxRetries: 0 });
const chat = { model, messages: [{ role: "user", content: question }], max_tokens: 12, seed: 1 };

const whole = await client.chat.completions.create(chat);
let text = "";
for await (const part of await client.chat.completions.create({ ...chat, stream: true })) {
  text += part.choices[0]?.delta.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);
exercised("chat");

const format = { type: "json_schema", json_schema: { name: "weather", schema: weather, strict: true } };
const parsed = await client.chat.completions.parse({ ...chat, max_tokens: 200, response_format: format });
checkWeather(parsed.choices[0].message.parsed);
exercised("chat parse");

const calls = [];
const runner = client.chat.completions.runTools({
  ...chat,
  max_tokens: 200,
  tools: [
    {
      type: "function",
      function: {
        name: "weather",
        parameters: weather,
        parse: JSON.parse,
        function: (args) => {
          calls.push(args);
          return "rain";
        },
      },
    },
  ],
  tool_choice: { type: "function", function: { name: "weather" } },
});
await runner.done();
assert.equal(calls.length, 1);
checkWeather(calls[0]);
exercised("chat tools");

const response = await client.responses.create({ model, input: question, max_output_tokens: 12 });
assert((await client.responses.retrieve(response.id)).output_text === response.output_text);
const stream = client.responses.stream({ model, input: question, max_output_tokens: 12, temperature: 0 });
let streamed = "";
stream.on("response.output_text.delta", (event) => (streamed += event.delta));
assert.equal((await stream.finalResponse()).output_text, streamed);
exercised("responses");

const form = await client.responses.parse({
  model,
  input: question,
  max_output_tokens: 200,
  text: { format: { type: "json_schema", name: "weather", schema: weather, strict: true } },
});
checkWeather(form.output_parsed);
exercised("responses parse");

const called = await client.responses.create({
  model,
  input: question,
  max_output_tokens: 200,
  tools: [{ type: "function", name: "weather", parameters: weather, strict: true }],
  tool_choice: "required",
});
checkWeather(JSON.parse(called.output.find((item) => item.type === "function_call").arguments));
exercised("responses tools");

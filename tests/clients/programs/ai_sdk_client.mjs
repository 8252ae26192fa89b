// The AI SDK: text, streams, tools and objects through chat completions, responses and messages.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, streamText, tool } from "ai";
import { baseUrl, checkWeather, exercised, model, question, weather } from "./program.mjs";

const url = { baseURL: `${baseUrl}/v1`, apiKey: "none" };
const models = {
  chat: createOpenAICompatible({ ...url, name: "octavo", supportsStructuredOutputs: true })(model),
  responses: createOpenAI(url).responses(model),
  messages: createAnthropic(url)(model),
};
for (const [name, languageModel] of Object.entries(models)) {
  const ask = { model: languageModel, prompt: question, maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
  const whole = await generateText(ask);
  let text = "";
  for await (const part of streamText(ask).textStream) text += part;
  assert.equal(text, whole.text);
  exercised(name);

  const tools = { weather: tool({ inputSchema: jsonSchema(weather) }) };
  const called = await generateText({ ...ask, maxOutputTokens: 200, tools, toolChoice: "required" });
  checkWeather(called.toolCalls[0].input);
  exercised(`${name} tools`);
}

const output = Output.object({ schema: jsonSchema(weather) });
const form = await generateText({ model: models.chat, prompt: question, maxOutputTokens: 200, output });
checkWeather(form.output);
exercised("structured output");

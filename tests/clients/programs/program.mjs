// What all programs share: the server's address, a tool, and the report of what was exercised.
import assert from "node:assert/strict";

export const [baseUrl, model] = process.argv.slice(2);
export const question = "What is the weather?";
export const weather = {
  type: "object",
  properties: { city: { type: "string", enum: ["Ulm", "Bonn"] }, days: { type: "integer", minimum: 1, maximum: 9 } },
  required: ["city", "days"],
  additionalProperties: false,
};

export function exercised(feature) {
  console.log(`exercised: ${feature}`);
}

export function checkWeather(args) {
  assert.deepEqual(Object.keys(args).sort(), ["city", "days"]);
  assert(weather.properties.city.enum.includes(args.city));
  assert(args.days >= 1 && args.days <= 9);
}

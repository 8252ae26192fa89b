// The parameters beside the chat: converts form fields to request fields.
import { byId } from "./element.js";

const REMEMBERED = ["system", "temperature", "top_p", "max_tokens", "seed", "stop_strings", "tools", "tool_choice", "schema", "extra"];
const STORE = "octavo.settings";

/** Restore the form's saved values, and save further changes. */
export function rememberSettings() {
  const saved = JSON.parse(localStorage.getItem(STORE) ?? "{}");
  for (const id of REMEMBERED) {
    if (saved[id] !== undefined) byId(id).value = saved[id];
    byId(id).addEventListener("change", () => {
      localStorage.setItem(STORE, JSON.stringify(Object.fromEntries(REMEMBERED.map((name) => [name, byId(name).value]))));
    });
  }
}

/** Return the JSON in a labelled field, undefined if it is empty; mark the field and throw if it is not JSON. */
export function readJson(field) {
  const text = field.value.trim();
  field.classList.remove("wrong");
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    field.classList.add("wrong");
    throw new Error(`${field.labels[0].firstChild.textContent.trim()}: ${error.message}`);
  }
}

/** Return the number in a field, undefined if it is empty. */
export const readNumber = ({ value }) => (value === "" ? undefined : Number(value));

const json = (id) => readJson(byId(id));
const number = (id) => readNumber(byId(id));

/**
 * Return a request's fields, without its messages.
 *
 * Throws an Error that names the field when one of them is not JSON.
 */
export function readSettings() {
  const stops = byId("stop_strings").value.split("\n").filter((line) => line !== "");
  const tools = json("tools");
  const schema = json("schema");
  return {
    model: byId("model").value || undefined,
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    stop: stops.length ? stops : undefined,
    ...(byId("logprobs").checked ? { logprobs: true, top_logprobs: 5 } : {}),
    ...(byId("receipts").checked ? { return_receipt: true } : {}),
    ...(tools?.length ? { tools, tool_choice: byId("tool_choice").value } : {}),
    ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
    ...json("extra"),
  };
}

/** Return the messages at the start of every conversation. */
export function openingMessages() {
  const system = byId("system").value.trim();
  return system ? [{ role: "system", content: system }] : [];
}

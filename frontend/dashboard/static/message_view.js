// The view of one message: a bubble that is updated while an answer streams. Its images and audio clips are data URLs.
import { element } from "./element.js";
import { tokenSpans } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

const SHOWN = {
  image_url: (src) => element("img", { src, alt: "" }),
  audio_url: (src) => element("audio", { src, controls: true }),
};

export class MessageView {
  #media = element("div", { class: "images" });
  #text = element("div", { class: "text" });
  #calls = element("div");
  #reasoning = element("details", { hidden: true }, element("summary", {}, "Reasoning"), element("pre"));
  #who;

  /** `content` is a message's: a text, or a list of parts. */
  constructor(role, content = "") {
    const parts = typeof content === "string" ? [{ type: "text", text: content }] : content;
    this.#who = element("div", { class: "who" }, NAMES[role]);
    this.root = element("div", { class: `message ${role}` }, this.#who, this.#reasoning, this.#media, this.#text, this.#calls);
    this.text = parts.filter(({ type }) => type === "text").map(({ text }) => text).join("\n");
    this.#media.replaceChildren(...parts.filter(({ type }) => type in SHOWN).map((part) => SHOWN[part.type](part[part.type].url)));
  }

  set text(text) {
    this.#text.textContent = text;
  }

  /** Show an answer so far. */
  show(answer) {
    this.#reasoning.hidden = !answer.reasoning;
    this.#reasoning.lastChild.textContent = answer.reasoning;
    // Probabilities are per generated token; with reasoning or calls, these differ from the shown text.
    const isPlain = answer.tokens.length > 0 && !answer.reasoning && answer.toolCalls.length === 0;
    if (isPlain) this.#text.replaceChildren(...tokenSpans(answer.tokens));
    else this.#text.textContent = answer.content;
    this.#calls.replaceChildren(...answer.toolCalls.map((call) => element("div", { class: "call" },
      element("b", {}, call.function.name), element("pre", {}, pretty(call.function.arguments)))));
  }

  /** Show how the answer ended; with `onToolResult`, each call has a field for its result. */
  finish(answer, onToolResult) {
    if (answer.finishReason && answer.finishReason !== "stop") this.#who.textContent += ` · ended by ${answer.finishReason}`;
    if (onToolResult) answer.toolCalls.forEach((call, index) => this.#calls.children[index].append(resultField(call, onToolResult)));
  }

  fail(message) {
    this.root.classList.add("failed");
    this.root.append(element("div", { class: "error", role: "alert" }, message));
  }
}

function resultField(call, onToolResult) {
  const input = element("input", { placeholder: "Result of the call", ariaLabel: `Result of ${call.function.name}` });
  const form = element("form", { class: "answer" }, input, element("button", {}, "Give"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    form.remove();
    onToolResult(call, input.value);
  });
  return form;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete or truncated
  }
}

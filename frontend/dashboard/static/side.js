// One side of a comparison: its settings, and the answer it got.
import { Answer } from "./answer.js";
import { element, shortName } from "./element.js";
import { MessageView } from "./message_view.js";
import { saveButton } from "./receipt.js";
import { readJson, readNumber } from "./settings.js";

const NUMBERS = {
  temperature: { label: "Temperature", min: 0, max: 2, step: 0.1, value: 0.7 },
  top_p: { label: "Top p", min: 0, max: 1, step: 0.05, value: 1 },
  max_tokens: { label: "Max tokens", min: 1, step: 1, value: 128 },
  seed: { label: "Seed", step: 1, placeholder: "random" },
};

export class Side {
  #fields = {};
  #shown;

  constructor(root, name) {
    this.name = name;
    this.#fields.model = element("select");
    this.#fields.system = element("textarea", { rows: 2 });
    for (const [id, { label, ...properties }] of Object.entries(NUMBERS)) {
      this.#fields[id] = element("input", { type: "number", ...properties });
    }
    this.#fields.extra = element("textarea", { rows: 1, spellcheck: false, placeholder: '{"min_p": 0.05}' });
    for (const [id, field] of Object.entries(this.#fields)) field.dataset.field = id;
    this.#shown = element("div", { class: "shown" });
    root.append(
      element("h2", {}, name),
      this.#labelled("Model", "model"),
      this.#labelled("System prompt", "system"),
      element("div", { class: "four" }, ...Object.entries(NUMBERS).map(([id, { label }]) => this.#labelled(label, id))),
      this.#labelled("More fields (JSON)", "extra"),
      this.#shown,
    );
  }

  #labelled(text, id) {
    return element("label", {}, text, this.#fields[id]);
  }

  set models(ids) {
    const { model } = this.#fields;
    const { value } = model;
    model.replaceChildren(...ids.map((id) => element("option", { value: id }, shortName(id))));
    if (ids.includes(value)) model.value = value;
  }

  /** The values of the fields by name. */
  get values() {
    return Object.fromEntries(Object.entries(this.#fields).map(([id, field]) => [id, field.value]));
  }

  set values(values) {
    for (const [id, field] of Object.entries(this.#fields)) {
      if (values[id] !== undefined) field.value = values[id];
    }
  }

  /** Show the answer to a question while it streams, and return it; null if it failed. */
  async ask(question, signal) {
    const view = new MessageView("assistant");
    this.#shown.replaceChildren(view.root);
    const answer = new Answer();
    try {
      await answer.stream(this.#body(question), signal, () => view.show(answer));
    } catch (error) {
      view.fail(signal.aborted ? "stopped" : error.message);
      return null;
    }
    view.finish(answer, null);
    const save = answer.receipt ? [saveButton(answer)] : []; // "More fields" may have turned it off
    const spans = [element("span", { class: "muted" }, answer.summary), element("span", { class: "space" })];
    this.#shown.append(element("div", { class: "row" }, ...spans, ...save));
    return answer;
  }

  /** Mark the tokens from an index on as different. */
  markFrom(index) {
    [...this.#shown.querySelectorAll(".token")].slice(index).forEach((token) => token.classList.add("differs"));
  }

  /** Every answer has a receipt, which is what is compared. */
  #body(question) {
    const { model, system, temperature, top_p, max_tokens, seed, extra } = this.#fields;
    const opening = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
    return {
      model: model.value || undefined,
      temperature: readNumber(temperature),
      top_p: readNumber(top_p),
      max_tokens: readNumber(max_tokens),
      seed: readNumber(seed),
      logprobs: true,
      top_logprobs: 5,
      return_receipt: true,
      ...readJson(extra),
      messages: [...opening, { role: "user", content: question }],
    };
  }
}

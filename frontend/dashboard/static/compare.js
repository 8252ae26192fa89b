// One question for two sides: two models, two settings, or the same request twice.
import { byId } from "./element.js";
import { compareReceipts } from "./receipt.js";
import { Side } from "./side.js";

const STORE = "octavo.compare";

export class Compare {
  #sides = [new Side(byId("side-a"), "A"), new Side(byId("side-b"), "B")];
  #running = null;

  constructor() {
    this.#restore();
    byId("compare").addEventListener("change", () => this.#save());
    byId("question").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    byId("copy-side").addEventListener("click", () => this.#copy());
    byId("stop-both").addEventListener("click", () => this.#running?.abort());
    addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
  }

  set models(ids) {
    for (const side of this.#sides) side.models = ids;
    this.#restore(); // a model can be chosen only now
  }

  #restore() {
    const saved = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    if (saved.question) byId("question-text").value = saved.question;
    for (const side of this.#sides) side.values = saved[side.name] ?? {};
  }

  #save() {
    const sides = this.#sides.map((side) => [side.name, side.values]);
    localStorage.setItem(STORE, JSON.stringify({ question: byId("question-text").value, ...Object.fromEntries(sides) }));
  }

  /** Give B the settings of A. Without a seed both would draw their own, so A gets one first. */
  #copy() {
    const [a, b] = this.#sides;
    const [random] = crypto.getRandomValues(new Uint32Array(1));
    a.values = { seed: a.values.seed || String(random) };
    b.values = a.values;
    this.#save();
  }

  async #ask() {
    const question = byId("question-text").value.trim();
    if (!question || this.#running) return;
    const abort = (this.#running = new AbortController());
    this.#show("", "");
    this.#showRunning(true);
    const [a, b] = await Promise.all(this.#sides.map((side) => side.ask(question, abort.signal)));
    this.#running = null;
    this.#showRunning(false);
    if (!a?.receipt || !b?.receipt) return;
    const { isIdentical, token, text } = compareReceipts(a.receipt, b.receipt);
    this.#show(text, isIdentical ? "same" : "different");
    if (!isIdentical) for (const side of this.#sides) side.markFrom(token);
  }

  #show(text, kind) {
    const verdict = byId("verdict");
    verdict.className = kind;
    verdict.textContent = text;
  }

  #showRunning(isRunning) {
    byId("ask-both").hidden = isRunning;
    byId("stop-both").hidden = !isRunning;
  }
}

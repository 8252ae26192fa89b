// The conversation: sends the input, shows the answer, and keeps both for the next turn.
import { Answer } from "./answer.js";
import { getJson, postForm } from "./api.js";
import { Attachments } from "./attachments.js";
import { byId, element } from "./element.js";
import { MessageView } from "./message_view.js";
import { saveButton } from "./receipt.js";
import { openingMessages, readSettings } from "./settings.js";

export class Chat {
  #messages = [];
  #openCalls = 0;
  #running = null;
  #attachments = new Attachments({
    readsAudio: async () => (await getJson("dashboard/state")).engine.reads.includes("audio"),
    onAudio: (file) => this.#transcribe(file),
    onRefusal: (problem) => {
      byId("stats").textContent = problem;
    },
  });

  constructor() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#say();
    });
    byId("input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("composer").requestSubmit();
      }
    });
    byId("stop").addEventListener("click", () => this.#running?.abort());
    addEventListener("keydown", (event) => event.key === "Escape" && this.#running?.abort());
    byId("clear").addEventListener("click", () => this.#clear());
    this.#clear();
  }

  #clear() {
    this.#running?.abort();
    this.#messages = [];
    this.#openCalls = 0;
    this.#attachments.clear();
    byId("messages").replaceChildren(element("p", { class: "empty" }, "Ask something. The parameters apply to the next answer."));
    byId("stats").textContent = "";
  }

  async #say() {
    if (this.#running || !(await this.#attachments.ready())) return;
    if (this.#running) return; // Enter was pressed twice while a file was read
    const text = byId("input").value;
    const files = this.#attachments.take();
    if (!text.trim() && !files.length) return;
    byId("input").value = "";
    const parts = text.trim() ? [...files, { type: "text", text }] : files;
    this.#add({ role: "user", content: files.length ? parts : text });
    this.#answer();
  }

  /** Show what is spoken in a file. It is no part of the conversation: models that transcribe have none. */
  async #transcribe(file) {
    this.#append(new MessageView("user", file.name));
    const view = new MessageView("assistant");
    this.#append(view);
    try {
      const { text, usage } = await postForm("v1/audio/transcriptions", { file, model: byId("model").value });
      view.text = text;
      byId("stats").textContent = `${usage.seconds} s of audio`;
    } catch (error) {
      view.fail(error.message);
    }
  }

  #add(message) {
    this.#messages.push(message);
    this.#append(new MessageView(message.role, message.content));
  }

  #append(view) {
    const list = byId("messages");
    list.querySelector(".empty")?.remove();
    list.append(view.root);
    list.scrollTop = list.scrollHeight;
  }

  #giveResult(call, content) {
    this.#add({ role: "tool", tool_call_id: call.id, content });
    this.#openCalls -= 1;
    if (this.#openCalls === 0) this.#answer();
  }

  async #answer() {
    const view = new MessageView("assistant");
    this.#append(view);
    const answer = new Answer();
    const abort = (this.#running = new AbortController());
    this.#showRunning(true);
    try {
      const body = { ...readSettings(), messages: [...openingMessages(), ...this.#messages] };
      await answer.stream(body, abort.signal, () => this.#follow(() => view.show(answer)));
    } catch (error) {
      if (abort.signal.aborted) answer.finishReason = "you";
      else {
        view.fail(error.message);
        if (error.status) this.#messages.pop(); // what the server refuses would be refused again with the next message
      }
    }
    // The chat was cleared meanwhile: drop the answer.
    if (this.#running === abort) {
      this.#running = null;
      this.#showRunning(false);
    }
    if (view.root.isConnected && (answer.content || answer.toolCalls.length)) {
      this.#messages.push(answer.message);
      this.#openCalls = answer.toolCalls.length;
      view.finish(answer, (call, content) => this.#giveResult(call, content));
    }
    if (answer.receipt) view.root.append(saveButton(answer));
    byId("stats").textContent = answer.summary;
  }

  /** Change the list, and keep it scrolled to the end if it was. */
  #follow(change) {
    const list = byId("messages");
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    change();
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  }

  #showRunning(isRunning) {
    byId("send").hidden = isRunning;
    byId("stop").hidden = !isRunning;
  }
}

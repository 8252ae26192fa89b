// Files for the conversation: images wait for the next message, and so do audio clips if the model reads them there.
import { byId, element } from "./element.js";

/** Takes files from the button, from a drop and from the clipboard. */
export class Attachments {
  #files = []; // {name, kind, url} with the file as a data URL
  #reading = new Set(); // promises of files that are being read; each tells whether they can be used
  #readsAudio;
  #onAudio;
  #onRefusal;

  /** `readsAudio` tells whether audio clips are parts of messages; else `onAudio` gets them. `onRefusal` gets a sentence about a file that is neither. */
  constructor({ readsAudio, onAudio, onRefusal }) {
    this.#readsAudio = readsAudio;
    this.#onAudio = onAudio;
    this.#onRefusal = onRefusal;
    const chooser = byId("files");
    byId("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", () => {
      this.#add([...chooser.files]);
      chooser.value = ""; // the same file may be chosen again
    });
    const talk = byId("talk");
    talk.addEventListener("dragover", (event) => {
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      talk.classList.add("dropping");
    });
    talk.addEventListener("dragleave", (event) => talk.contains(event.relatedTarget) || talk.classList.remove("dropping"));
    talk.addEventListener("drop", (event) => {
      talk.classList.remove("dropping");
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
    byId("input").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.#add([...event.clipboardData.files]);
    });
  }

  /** Wait for the files that are being read; return whether all of these can be used. */
  async ready() {
    let areUsable = true;
    while (this.#reading.size) areUsable = (await Promise.all(this.#reading)).every(Boolean) && areUsable;
    return areUsable;
  }

  /** Return the files as parts of a message, and forget them. */
  take() {
    const parts = this.#files.map(({ kind, url }) => ({ type: kind, [kind]: { url } }));
    this.clear();
    return parts;
  }

  clear() {
    this.#files = [];
    this.#show();
  }

  #add(files) {
    const reading = this.#read(files).finally(() => this.#reading.delete(reading));
    this.#reading.add(reading);
  }

  async #read(files) {
    let areUsable = true;
    for (const file of files) {
      try {
        await this.#addOne(file);
      } catch (error) { // the server does not say what the model reads, or the file cannot be used
        this.#onRefusal(`${file.name}: ${error.message}`);
        areUsable = false;
      }
    }
    this.#show();
    return areUsable;
  }

  async #addOne(file) {
    if (file.type.startsWith("image/")) await this.#keep(file, "image_url");
    else if (!file.type.startsWith("audio/")) throw new Error("only images and audio can be attached");
    else if (await this.#readsAudio()) await this.#keep(file, "audio_url");
    else this.#onAudio(file);
  }

  async #keep(file, kind) {
    this.#files.push({ name: file.name, kind, url: await dataUrl(file) });
  }

  #show() {
    byId("attached").replaceChildren(...this.#files.map((file) => {
      const remove = element("button", { type: "button", class: "quiet", ariaLabel: `Remove ${file.name}` }, "×");
      remove.addEventListener("click", () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#show();
      });
      const shown = file.kind === "image_url" ? element("img", { src: file.url, alt: file.name }) : file.name;
      return element("span", {}, shown, remove);
    }));
  }
}

const hasFiles = (transfer) => [...transfer.types].includes("Files");

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

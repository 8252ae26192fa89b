// Files for the conversation: images wait for the next message, a sound is written down at once.
import { byId, element } from "./element.js";

/** Takes files from the button, from a drop and from the clipboard. */
export class Attachments {
  #images = []; // {name, url} with the file as a data URL
  #onSound;
  #onRefusal;

  /** `onSound` gets an audio file, `onRefusal` a sentence about a file that is neither. */
  constructor({ onSound, onRefusal }) {
    this.#onSound = onSound;
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

  /** Return the images as parts of a message, and forget them. */
  take() {
    const parts = this.#images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    this.clear();
    return parts;
  }

  clear() {
    this.#images = [];
    this.#show();
  }

  async #add(files) {
    for (const file of files) {
      if (file.type.startsWith("image/")) this.#images.push({ name: file.name, url: await dataUrl(file) });
      else if (file.type.startsWith("audio/")) this.#onSound(file);
      else this.#onRefusal(`${file.name}: only images and sounds can be attached`);
    }
    this.#show();
  }

  #show() {
    byId("attached").replaceChildren(...this.#images.map((image) => {
      const remove = element("button", { type: "button", class: "quiet", ariaLabel: `Remove ${image.name}` }, "×");
      remove.addEventListener("click", () => {
        this.#images = this.#images.filter((other) => other !== image);
        this.#show();
      });
      return element("span", {}, element("img", { src: image.url, alt: image.name }), remove);
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

// Creates elements. Text is inserted as text, never as markup, so a model's output cannot inject HTML.

/** Return an element with properties and children; strings become text. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class") made.className = value;
    else if (name.startsWith("--")) made.style.setProperty(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Return a model's name without the directories before it. */
export const shortName = (model) => model.split("/").pop();

export const byId = (id) => document.getElementById(id);

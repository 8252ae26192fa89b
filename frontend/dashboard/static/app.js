// Sets up the page: its views, the theme, the models, the health.
import { getJson } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId, element, shortName } from "./element.js";
import { EngineView } from "./engine.js";
import { rememberSettings } from "./settings.js";

const VIEWS = ["chat", "compare", "engine"];
const HEALTH_INTERVAL_MS = 5000;

function showHealth(isGood, text) {
  const health = byId("health");
  health.className = `health ${isGood ? "good" : "bad"}`;
  health.lastElementChild.textContent = text;
}

async function watchHealth() {
  if (!document.hidden && !engine.shown) {
    try {
      const response = await fetch("health", { signal: AbortSignal.timeout(4000) });
      showHealth(response.ok, response.ok ? shortName(byId("model").value) || "ready" : (await response.json()).reason);
    } catch {
      showHealth(false, "no answer from the server");
    }
  }
  setTimeout(watchHealth, HEALTH_INTERVAL_MS);
}

function open(view) {
  for (const name of VIEWS) {
    byId(name).hidden = name !== view;
    byId(`tab-${name}`).setAttribute("aria-selected", String(name === view));
  }
  byId("popover").hidden = true;
  engine.isOpen = view === "engine";
  history.replaceState(null, "", `#${view}`);
}

function chooseTheme() {
  const root = document.documentElement;
  const saved = localStorage.getItem("octavo.theme");
  if (saved) root.dataset.theme = saved;
  byId("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    localStorage.setItem("octavo.theme", root.dataset.theme);
    engine.redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => engine.redraw());
}

async function listModels() {
  const ids = (await getJson("v1/models")).data.map((model) => model.id);
  byId("model").replaceChildren(...ids.map((id) => element("option", { value: id }, shortName(id))));
  compare.models = ids;
}

const engine = new EngineView(showHealth);
const compare = new Compare();
rememberSettings();
chooseTheme();
new Chat();
if (matchMedia("(max-width: 760px)").matches) byId("settings").open = false;
for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => open(name));
addEventListener("hashchange", () => VIEWS.includes(location.hash.slice(1)) && open(location.hash.slice(1)));
await listModels().catch((error) => showHealth(false, error.message));
open(VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
watchHealth();

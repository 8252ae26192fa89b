// The live view: polls the engine's state once a second while it is visible, and draws it.
import { getJson } from "./api.js";
import { drawBars, drawCells } from "./chart.js";
import { byId, element, shortName } from "./element.js";
import { percentile, since } from "./percentiles.js";

const INTERVAL_MS = 1000;
const SECONDS_SHOWN = 120;
const STEPS_SHOWN = 120;
const WINDOW_S = 60;
const LATENCIES = { ttft: "First token", itl: "Between tokens", e2e: "Whole request", queue: "In the queue" };
const OF_TOKENS = ["ttft", "itl"]; // which a pooling model does not have

export class EngineView {
  #history = []; // states of the last minutes, without the large fields
  #rates = [];
  #timer = null;
  #last = null;
  #chosen = null; // index of the engine that is shown; null: the first

  constructor(onHealth) {
    this.onHealth = onHealth;
    addEventListener("resize", () => this.#last && this.#draw(this.#last));
    document.addEventListener("visibilitychange", () => this.#schedule(0));
  }

  set isOpen(isOpen) {
    this.shown = isOpen;
    this.#schedule(0);
  }

  redraw() {
    if (this.#last) this.#draw(this.#last);
  }

  #schedule(delay) {
    clearTimeout(this.#timer);
    if (this.shown && !document.hidden) this.#timer = setTimeout(() => this.#poll(), delay);
  }

  async #poll() {
    try {
      // A server of several models shows the engines of the chosen one.
      const query = new URLSearchParams({ model: byId("model").value });
      if (this.#chosen !== null) query.set("engine", this.#chosen);
      const state = await getJson(`dashboard/state?${query}`, AbortSignal.timeout(10_000));
      this.#remember(state);
      this.#last = state;
      this.onHealth(state.healthy, state.healthy ? shortName(state.engine.models[0]) : state.health_reason);
      this.#draw(state);
    } catch (error) {
      this.onHealth(false, error.message);
    }
    this.#schedule(INTERVAL_MS);
  }

  #remember(state) {
    const last = this.#history.at(-1);
    if (last && (state.shown !== last.shown || state.engine.epoch !== last.epoch || state.stats.num_steps < last.stats.num_steps)) {
      this.#history = []; // another engine, or another core: its totals restarted at zero
      if (state.shown !== last.shown) this.#rates = [];
    } else if (last) {
      const seconds = Math.max(state.time - last.time, 0.001);
      const rate = (name) => (state.stats[name] - last.stats[name]) / seconds;
      this.#rates.push([rate("generation_tokens"), rate("prompt_tokens")]);
      this.#rates = this.#rates.slice(-SECONDS_SHOWN);
    }
    this.#history.push({ time: state.time, shown: state.shown, epoch: state.engine.epoch, stats: state.stats, latencies: state.latencies });
    while (this.#history.length > 2 && this.#history[1].time < state.time - WINDOW_S) this.#history.shift();
  }

  #draw(state) {
    this.#drawEngines(state);
    this.#drawNumbers(state);
    drawBars(byId("throughput"), this.#rates, ["decode", "prefill"], { slots: SECONDS_SHOWN });
    const steps = state.steps.slice(-STEPS_SHOWN);
    drawBars(byId("steps"), steps.map((step) => [step.num_decode_tokens, step.num_prefill_tokens]), ["decode", "prefill"],
      { slots: STEPS_SHOWN, limit: steps.some((step) => step.num_prefill_tokens) ? state.engine.max_num_batched_tokens : null });
    byId("step-note").textContent = stepNote(steps, state.engine);
    drawCells(byId("blocks"), state.blocks, ["free", "cached", "used", "shared"]);
    byId("block-note").textContent = blockNote(state);
    this.#drawLatency(state);
    drawRequests(state);
  }

  /** One line for each engine; a click shows its details below. */
  #drawEngines({ engines, shown }) {
    byId("engines-card").hidden = engines.length < 2;
    const head = element("tr", {}, ...["engine", "", "running", "waiting", "KV cache used", "prefix hits", "tokens generated"].map((name, index) =>
      element("th", index > 1 ? { class: "figure" } : {}, name)));
    const rows = engines.map(({ index, state, reason, stats }) => {
      const figures = [
        stats.num_running,
        stats.num_waiting,
        stats.num_blocks ? percent(1 - stats.num_free_blocks / stats.num_blocks) : "–",
        stats.prefix_cache_queries ? percent(stats.prefix_cache_hits / stats.prefix_cache_queries) : "–",
        stats.generation_tokens.toLocaleString("en"),
      ];
      const row = element("tr", { ariaSelected: String(index === shown), tabIndex: 0 },
        element("td", {}, String(index)), element("td", { title: reason }, state),
        ...figures.map((figure) => element("td", { class: "figure" }, String(figure))));
      const choose = () => {
        this.#chosen = index;
        this.#schedule(0);
      };
      row.addEventListener("click", choose);
      row.addEventListener("keydown", (event) => event.key === "Enter" && choose());
      return row;
    });
    byId("engines").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
  }

  #drawNumbers(state) {
    const { stats } = state;
    const [generated, prompt] = this.#rates.at(-1) ?? [0, 0];
    const first = this.#history[0].stats;
    const asked = stats.prefix_cache_queries - first.prefix_cache_queries;
    const found = stats.prefix_cache_hits - first.prefix_cache_hits;
    const figures = [
      state.engine.tasks.length ? ["task", state.engine.tasks.join(", ")] : ["tokens/s generated", generated.toFixed(0)],
      ["tokens/s prompt", prompt.toFixed(0)],
      ["running", `${stats.num_running} / ${state.engine.max_num_seqs}`],
      ["waiting" + (stats.waiting_reason ? `: ${stats.waiting_reason}` : ""), stats.num_waiting],
      ["KV cache used", percent(1 - stats.num_free_blocks / stats.num_blocks)],
      ["prefix hits, last minute", asked ? percent(found / asked) : "–"],
      ...(stats.kv_offload_capacity_bytes ? [["prompt tokens from host memory", stats.external_prefix_cache_hits]] : []),
      ...encoderCache(stats, first),
      ...speculation(stats, first),
      ["preemptions", stats.num_preemptions],
    ];
    byId("numbers").replaceChildren(...figures.map(([label, value]) =>
      element("div", { class: "number" }, element("b", {}, String(value)), element("small", {}, label))));
  }

  #drawLatency(state) {
    const earlier = this.#history[0] === this.#history.at(-1) ? null : this.#history[0].latencies;
    const known = Object.entries(LATENCIES).filter(([key]) => !state.engine.tasks.length || !OF_TOKENS.includes(key));
    const rows = known.map(([key, label]) => {
      const recent = earlier ? since(state.latencies[key], earlier[key]) : state.latencies[key];
      const shown = recent.counts.some(Boolean) ? recent : state.latencies[key];
      return element("tr", {}, element("td", {}, label),
        ...[0.5, 0.9, 0.99].map((fraction) => element("td", { class: "figure" }, seconds(percentile(shown, fraction)))));
    });
    const head = element("tr", {}, element("th", {}, "last minute, or since the start"),
      ...["median", "p90", "p99"].map((name) => element("th", { class: "figure" }, name)));
    byId("latency").replaceChildren(head, ...rows);
  }
}

const percent = (fraction) => `${(100 * fraction).toFixed(fraction && fraction < 0.1 ? 1 : 0)} %`;

/** Figures of the encoder cache; none if the model reads text only. */
function encoderCache(stats, first) {
  if (!stats.num_encoder_cache_tokens) return [];
  const queries = stats.encoder_cache_queries - first.encoder_cache_queries;
  const hits = stats.encoder_cache_hits - first.encoder_cache_hits;
  return [
    ["encoder cache used", percent(stats.num_cached_encoder_tokens / stats.num_encoder_cache_tokens)],
    ["encoder cache hits, last minute", queries ? percent(hits / queries) : "–"],
    ["images and audio clips encoded", stats.encoder_cache_queries - stats.encoder_cache_hits],
  ];
}

/** Figures of speculative decoding in the last minute; none if the engine has never drafted. */
function speculation(stats, first) {
  if (!stats.spec_decode_num_drafts) return [];
  const grown = (name) => stats[`spec_decode_num_${name}`] - first[`spec_decode_num_${name}`];
  const drafts = grown("drafts");
  const accepted = grown("accepted_tokens");
  return [
    ["drafts accepted, last minute", drafts ? percent(accepted / grown("draft_tokens")) : "–"],
    ["tokens per speculating step", drafts ? (1 + accepted / drafts).toFixed(2) : "–"],
  ];
}

function seconds(value) {
  if (value === null) return "–";
  return value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(1)} s`;
}

function stepNote(steps, engine) {
  if (!steps.length) return "";
  const mean = steps.reduce((sum, step) => sum + step.elapsed_s, 0) / steps.length;
  return ` · ${seconds(mean)} each · budget ${engine.max_num_batched_tokens}`;
}

function blockNote({ engine, stats }) {
  return ` · ${(stats.num_blocks - stats.num_free_blocks).toLocaleString("en")} of ${stats.num_blocks.toLocaleString("en")} held, ${engine.block_size} tokens each`;
}

function drawRequests(state) {
  const head = element("tr", {}, ...["request", "", "prompt", "out", "blocks", "age"].map((name, index) =>
    element("th", index > 1 ? { class: "figure" } : {}, name)));
  const rows = state.requests.slice(0, 64).map((request) => element("tr", {},
    element("td", {}, request.request_id),
    element("td", {}, progress(request)),
    element("td", { class: "figure" }, String(request.num_prompt_tokens)),
    element("td", { class: "figure" }, `${request.num_output_tokens} / ${request.max_tokens}`),
    element("td", { class: "figure" }, String(request.num_blocks)),
    element("td", { class: "figure" }, seconds(request.age_s))));
  if (!rows.length) rows.push(element("tr", {}, element("td", { colSpan: 6, class: "muted" }, "none")));
  const more = state.stats.num_running + state.stats.num_waiting - Math.min(64, state.requests.length);
  if (more > 0) rows.push(element("tr", {}, element("td", { colSpan: 6, class: "muted" }, `and ${more} more`)));
  byId("requests").replaceChildren(head, ...rows);
}

/** A bar over prompt and output: cached, computed, generated. */
function progress(request) {
  if (!request.is_running) return request.num_preemptions ? "preempted" : "waiting";
  const whole = request.num_prompt_tokens + request.max_tokens;
  const part = (kind, tokens) => {
    const bar = element("i", { class: kind });
    bar.style.width = `${(100 * Math.max(0, tokens)) / whole}%`;
    return bar;
  };
  const computed = Math.min(request.num_computed_tokens, request.num_prompt_tokens) - request.num_cached_tokens;
  const title = `${request.num_cached_tokens} cached, ${Math.max(0, computed)} computed, ${request.num_output_tokens} generated`;
  return element("span", { class: "bar", title }, part("shared", request.num_cached_tokens), part("prefill", computed), part("decode", request.num_output_tokens));
}

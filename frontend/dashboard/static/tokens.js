// Tokens coloured by their probability, with the alternatives in a popover.
import { byId, element } from "./element.js";

/** Return one span per token: the less likely the token, the stronger its colour. */
export function tokenSpans(tokens) {
  return tokens.map((token) => {
    const chance = Math.exp(token.logprob);
    const span = element("span", { class: "token", tabIndex: 0, "--doubt": (1 - chance).toFixed(3) }, token.token);
    for (const event of ["mouseenter", "focus", "click"]) span.addEventListener(event, () => show(span, token));
    for (const event of ["mouseleave", "blur"]) span.addEventListener(event, hide);
    return span;
  });
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function show(span, token) {
  const rows = [token, ...token.top_logprobs.filter((other) => other.token !== token.token)];
  const table = element("table", {}, ...rows.map((row, index) =>
    element("tr", {}, element("td", {}, index === 0 ? element("b", {}, JSON.stringify(row.token)) : JSON.stringify(row.token)),
      element("td", {}, percent(row.logprob)))));
  const popover = byId("popover");
  popover.replaceChildren(table);
  popover.hidden = false;
  const box = span.getBoundingClientRect();
  const top = box.bottom + popover.offsetHeight + 8 < innerHeight ? box.bottom + 4 : box.top - popover.offsetHeight - 4;
  popover.style.top = `${Math.max(4, top)}px`;
  popover.style.left = `${Math.max(4, Math.min(box.left, innerWidth - popover.offsetWidth - 8))}px`;
}

function hide() {
  byId("popover").hidden = true;
}

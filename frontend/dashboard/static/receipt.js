// Receipts of answers: how two of them compare, and the file that `octavo verify` reads.
import { element } from "./element.js";

const DIGITS_PER_TOKEN = 8; // in a receipt's logprobs

const sequenceOf = (receipt) => receipt.prompts[0].sequences[0];

/**
 * Compare two answers by the tokens and the logprob bits in their receipts.
 *
 * Returns `isIdentical`, `token` (index of the first different token), `logprob` (index of the first token with other
 * logprobs; both are the shorter length if there is none before), and `text` for the reader.
 */
export function compareReceipts(first, second) {
  const [a, b] = [sequenceOf(first), sequenceOf(second)];
  const shorter = Math.min(a.token_ids.length, b.token_ids.length);
  const firstDifference = (differs) => {
    const found = Array.from({ length: shorter }, (_, index) => index).findIndex(differs);
    return found < 0 ? shorter : found;
  };
  const token = firstDifference((index) => a.token_ids[index] !== b.token_ids[index]);
  const bits = ({ logprobs }, index) => logprobs.slice(index * DIGITS_PER_TOKEN, (index + 1) * DIGITS_PER_TOKEN);
  const logprob = firstDifference((index) => bits(a, index) !== bits(b, index));
  const haveSameTokens = token === shorter && a.token_ids.length === b.token_ids.length;
  const isIdentical = haveSameTokens && a.digest === b.digest;
  return { isIdentical, token, logprob, text: verdict({ isIdentical, haveSameTokens, token, logprob, count: shorter }) };
}

function verdict({ isIdentical, haveSameTokens, token, logprob, count }) {
  if (isIdentical) return `Identical, bit for bit: ${tokens(count)} and their logprobs`;
  if (haveSameTokens) return `The same ${tokens(count)}; the logprobs differ from token ${logprob + 1} on`;
  if (token === count) {
    const same = logprob === count ? "identical, bit for bit" : `the same; the logprobs differ from token ${logprob + 1} on`;
    return `Up to the end of the shorter answer, ${tokens(count)} are ${same}`;
  }
  const where = token === 0 ? "The first tokens differ" : `The answers differ from token ${token + 1} on`;
  return logprob < token ? `${where}, the logprobs from token ${logprob + 1} on` : where;
}

const tokens = (count) => (count === 1 ? "1 token" : `${count} tokens`);

/** Return a button that saves an answer with its request and receipt. */
export function saveButton(answer) {
  const button = element("button", { type: "button", class: "save", title: "A file for octavo verify" }, "Save receipt");
  button.addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([savedAnswer(answer)], { type: "application/json" }));
    element("a", { href: url, download: `octavo-receipt-${answer.receipt.digest.slice(0, 12)}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000); // a download reads the URL after the click has returned
  });
  return button;
}

/** The chunk with the receipt stays as the server wrote it: numbers in it may be too large for JavaScript. */
function savedAnswer(answer) {
  const [request, message] = [answer.request, answer.message].map((value) => JSON.stringify(value));
  return `{"url": "/v1/chat/completions", "request": ${request}, "message": ${message}, "response": ${answer.lastChunk}}\n`;
}

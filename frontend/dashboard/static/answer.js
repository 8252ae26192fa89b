// One streamed answer: text, reasoning, tool calls, logprobs, receipt. Independent of the page.
import { streamJson } from "./api.js";

/** Assembles the chunks of a streamed chat completion into the complete message. */
export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.toolCalls = [];
    this.tokens = []; // {token, logprob, top_logprobs} of each generated token, if requested
    this.finishReason = null;
    this.usage = null;
    this.request = null;
    this.receipt = null;
    this.lastChunk = ""; // the text of the chunk that has the receipt: JavaScript rounds the seed in it
    this.startMs = this.firstMs = this.endMs = null;
  }

  /**
   * Send a request and call `onChange` after each chunk of its answer.
   *
   * Throws an ApiError if the server rejects the request or the stream breaks, and an AbortError on `signal`.
   */
  async stream(body, signal, onChange) {
    this.request = { ...body, stream: true, stream_options: { include_usage: true } };
    this.startMs = performance.now();
    try {
      for await (const { chunk, text } of streamJson("v1/chat/completions", this.request, signal)) {
        this.#take(chunk, text);
        if (this.firstMs === null && (this.content || this.reasoning || this.toolCalls.length)) this.firstMs = performance.now();
        onChange();
      }
    } finally {
      this.endMs = performance.now();
    }
  }

  #take(chunk, text) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.receipt) [this.receipt, this.lastChunk] = [chunk.receipt, text];
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning ?? delta.reasoning_content ?? "";
    for (const part of delta.tool_calls ?? []) this.#takeCall(part);
    this.tokens.push(...(choice.logprobs?.content ?? []));
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
  }

  #takeCall(part) {
    const call = (this.toolCalls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }

  /** The message for the next request of the conversation. */
  get message() {
    const message = { role: "assistant", content: this.content || (this.toolCalls.length ? null : "") };
    if (this.toolCalls.length) message.tool_calls = this.toolCalls;
    return message;
  }

  /** One line with the number of tokens and the times; "" if the answer is not complete. */
  get summary() {
    if (!this.usage || this.firstMs === null) return "";
    const { prompt_tokens: prompt, completion_tokens: completion, prompt_tokens_details: details } = this.usage;
    const rate = completion > 1 ? ` · ${((1000 * (completion - 1)) / (this.endMs - this.firstMs)).toFixed(0)} tokens/s` : "";
    const cached = details?.cached_tokens ? ` (${details.cached_tokens} cached)` : "";
    return `${prompt} tokens in${cached}, ${completion} out · first after ${(this.firstMs - this.startMs).toFixed(0)} ms${rate}`;
  }
}

// One streamed answer: text, reasoning, tool calls, logprobs. Independent of the page.

/** Assembles the chunks of a streamed chat completion into the complete message. */
export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.toolCalls = [];
    this.tokens = []; // {token, logprob, top_logprobs} of each generated token, if requested
    this.finishReason = null;
    this.usage = null;
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
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
}

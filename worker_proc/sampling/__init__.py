"""From logits to token ids and logprobs, for each request by its own parameters."""

"""Sampling: from logits to token ids and logprobs, with the parameters of each request."""

"""Heads: a few layers that draft tokens from the hidden states of a model, for speculative decoding."""

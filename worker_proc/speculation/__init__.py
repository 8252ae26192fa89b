"""Drafters of the workers, for speculative decoding."""

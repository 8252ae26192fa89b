"""Drafts of the workers, for speculative decoding."""

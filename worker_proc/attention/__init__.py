"""Attention over the paged cache: planned once per step, run once per layer."""

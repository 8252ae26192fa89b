"""Turns parameters into submissions, and the engine's token events into text, for n sequences per prompt."""

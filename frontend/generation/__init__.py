"""Turns parameters into submissions and the engine's token events into text, for one or several sequences per
prompt."""

"""Turns a conversation into a prepared generation, for every API that takes messages. Independent of HTTP schemas."""

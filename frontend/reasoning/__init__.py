"""Reasoning: the text before an answer, recognized by its tags. Independent of HTTP."""

"""Reasoning: the text before an answer, recognized by its tags. Knows no HTTP."""

"""Reasoning: what a model thinks before it answers, told from the answer by its tags. Knows no HTTP."""

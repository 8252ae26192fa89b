"""Loads the operator's Python files with further parsers, written for octavo or for vLLM."""

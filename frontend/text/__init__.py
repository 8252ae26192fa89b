"""Converts text to tokens and back: tokenizer, incremental detokenizer, stop strings and chat templates."""

"""Vectors, classes and scores of prompts: what pooling models return instead of tokens."""

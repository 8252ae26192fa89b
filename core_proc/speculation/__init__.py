"""Drafts of the tokens that follow, which one step verifies: speculative decoding (docs/speculative-decoding.md)."""

"""Drafts of the next tokens that one step verifies: speculative decoding (docs/speculative-decoding.md)."""

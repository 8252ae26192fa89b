"""Pooling: from the hidden states of a prompt to its vector or class scores, or to those of each token."""

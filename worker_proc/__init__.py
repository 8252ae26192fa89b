"""Computes: model, KV tensors and sampling of one rank. Decides nothing about requests, blocks or budget."""

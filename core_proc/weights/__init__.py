"""Weights that are updated, put to sleep and woken up while the engine serves."""

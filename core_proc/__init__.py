"""Decides: requests, blocks and the budget of each step. Loads neither torch nor numpy, and computes nothing."""

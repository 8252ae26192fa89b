"""Weights that change, leave memory and come back while the engine serves."""

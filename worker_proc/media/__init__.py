"""Runs the encoder of a model on the media of a step, and keeps the results."""

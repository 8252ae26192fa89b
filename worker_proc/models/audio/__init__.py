"""Encoders of audio, and models of speech."""

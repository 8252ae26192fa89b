"""Renders the client's outputs as public JSON. Pure functions: no IO."""

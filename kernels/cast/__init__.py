"""Conversion to another float type. Only programs need it as an operation."""

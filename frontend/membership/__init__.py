"""The engines of a server: adds, drains, removes and replaces them, and keeps all HTTP processes up to date."""

"""Runners, which compute steps: one folder per runner (runners do not import each other), and their registry."""

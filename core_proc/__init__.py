"""The core process: manages requests, blocks and the budget of each step. Imports neither torch nor numpy."""

"""The command line: `octavo serve` and its siblings. Loads nothing heavy before a command runs."""

from octavo.frontend.cli.main import main

__all__ = ["main"]

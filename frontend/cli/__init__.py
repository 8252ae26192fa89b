"""The command line: `octavo serve` and the other commands. Nothing heavy is imported before a command runs."""

from octavo.frontend.cli.main import main

__all__ = ["main"]

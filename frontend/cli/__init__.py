"""The command line: `octavo serve` and the other commands. Expensive imports happen only when a command runs."""

from octavo.frontend.cli.main import main

__all__ = ["main"]

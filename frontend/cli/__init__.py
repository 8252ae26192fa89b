"""The command line: `octavo serve` and its siblings. Loads nothing heavy before a command runs."""

"""`octavo completion SHELL`: prints a script that completes commands, flags and values.

shtab generates the script from the parsers. It contains every suggestion, so no Tab has to start Python.
"""

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from octavo.frontend.cli.parser import CommandParser

if TYPE_CHECKING:
    from octavo.frontend.cli.main import Command

_EPILOG = """\
bash:       eval "$(octavo completion bash)" in ~/.bashrc
zsh:        octavo completion zsh > "${fpath[1]}/_octavo", then start a new shell
fish:       octavo completion fish > ~/.config/fish/completions/octavo.fish
tcsh:       octavo completion tcsh > ~/.octavo.tcsh, and source it in ~/.tcshrc
powershell: octavo completion powershell | Out-String | Invoke-Expression, in $PROFILE
"""

_FILES = re.compile(r"FILE|DIR|PATH|MODEL|--(model|tokenizer|chat-template|uds|record-steps|.*(file|path|dir|certs))")
"""Metavars of file arguments, and flags that take a file although their metavar does not show it."""

SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")


def parser() -> CommandParser:
    """Return the flags of `octavo completion`."""
    parser = CommandParser(
        "octavo completion", "Print a script that completes octavo's command line.", "SHELL", epilog=_EPILOG
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser


def run(argv: list[str]) -> int:
    """Print the script; return the exit code."""
    shell = parser().parse(argv).shell
    import shtab

    print(shtab.complete(full_parser(), shell))
    return 0


def full_parser() -> argparse.ArgumentParser:
    """Return one parser that has every command as a subparser and marks file arguments for shtab."""
    from octavo.frontend.cli.main import COMMANDS

    root = argparse.ArgumentParser("octavo")
    _add_commands(root, COMMANDS)
    return root


def _add_commands(root: argparse.ArgumentParser, commands: "Sequence[Command]") -> None:
    subparsers = root.add_subparsers()
    for command in commands:
        if command.commands:
            _add_commands(subparsers.add_parser(command.name, help=command.help), command.commands)
            continue
        flags = import_module(command.module).parser()
        _mark_files(flags)
        subparsers.add_parser(command.name, help=command.help, parents=[flags], add_help=False)


def _mark_files(parser: argparse.ArgumentParser) -> None:
    import shtab

    for action in parser._actions:
        takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        if takes_value and any(map(_FILES.fullmatch, (str(action.metavar), *action.option_strings))):
            action.complete = shtab.FILE  # type: ignore[attr-defined]

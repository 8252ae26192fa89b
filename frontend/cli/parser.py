"""`CommandParser`: base class of all parsers: no abbreviated flags, one-line errors, searchable help."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

EXIT_USAGE = 2

GROUPS_WORD = "groups"
"""Word in `--help=groups`, which lists the groups of flags."""

_ALIASES = {"listgroup": GROUPS_WORD}
"""vLLM's names for these words."""

_ALL = "all"


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` that does not abbreviate flags, but suggests the closest one.

    Args:
        prog: the command, such as "octavo chat".
        description: one or several sentences.
        usage: text that follows `prog` in the usage line.
        epilog: text printed verbatim after the flags.
        defaults: whether flags have defaults. If False, the result omits flags that are not on the command line.
    """

    def __init__(
        self, prog: str, description: str, usage: str = "[FLAG ...]", epilog: str = "", *, defaults: bool = True
    ) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            epilog=epilog or None,
            allow_abbrev=False,
            add_help=False,
            argument_default=None if defaults else argparse.SUPPRESS,
            formatter_class=_HelpFormatter,
        )
        self.named_groups: dict[str, argparse._ArgumentGroup] = {}
        """Groups of flags by their short names, for `--help=NAME`."""
        self.add_argument(
            "-h",
            "--help",
            action=_HelpAction,
            nargs="?",
            metavar="WORD",
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help=f"show this help, one group (--help={GROUPS_WORD} lists them), or the flags that mention WORD",
        )

    def add_named_group(self, name: str, title: str) -> argparse._ArgumentGroup:
        """Add a group of flags; `--help=NAME` shows only this group."""
        group = self.add_argument_group(f"{title} ({name})")
        self.named_groups[name] = group
        return group

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the parsed arguments.

        If the command line is invalid, print one line and exit with code 2.
        """
        settings, unknown = self.parse_known_args(argv)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return settings

    def error(self, message: str) -> NoReturn:
        """Print one line instead of the whole usage, and exit with code 2."""
        print(f"{self.prog}: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)

    def format_help_on(self, word: str) -> str:
        """Return the help for one group, or for the flags whose name or description contains a word.

        If nothing matches, print one line and exit with code 2.
        """
        word = _ALIASES.get(word, word)
        if word == _ALL:
            return self.format_help()
        if word == GROUPS_WORD:
            rows = [(name, group.title or "") for name, group in self.named_groups.items()]
            width = max((len(name) for name, _ in rows), default=0)
            lines = [f"  {name:<{width}}  {title.rpartition(' (')[0]}" for name, title in rows]
            return "\n".join([f"groups of {self.prog}, each shown by --help=NAME:", *lines, ""])
        if group := self.named_groups.get(word.lower()):
            return self._format_sections([(group.title or "", group._group_actions)])
        sections = [
            (group.title or "", [action for action in group._group_actions if _has_word(action, word)])
            for group in self._action_groups
        ]
        found = [(title, actions) for title, actions in sections if actions]
        if not found:
            close = suggestion(word, self.named_groups)
            self.error(f"no group or flag contains {word!r}{close}")
        return self._format_sections(found)

    def _format_sections(self, sections: Iterable[tuple[str, Sequence[argparse.Action]]]) -> str:
        formatter = self._get_formatter()
        for title, actions in sections:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}"
        known = [option for action in self._actions for option in action.option_strings]
        return f"unknown flag {word}" + suggestion(word.partition("=")[0], known)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ": did you mean ...?" with the closest known word; "" if no word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def _has_word(action: argparse.Action, word: str) -> bool:
    if action.help is argparse.SUPPRESS:
        return False
    wanted = word.lstrip("-").lower().replace("_", "-")
    texts = [*action.option_strings, action.help or ""]
    return any(wanted in text.lower().replace("_", "-") for text in texts)


class _HelpAction(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        """Print the help and exit."""
        assert isinstance(parser, CommandParser)
        print(parser.format_help() if values is None else parser.format_help_on(values), end="")
        parser.exit()


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter with wider columns that preserves the lines of an epilog."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=110)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text:
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))

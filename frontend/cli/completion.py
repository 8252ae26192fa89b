"""`octavo completion SHELL`: a script that completes commands, flags and their values, made from the parsers.

What it knows is what the parsers know when it is printed, so that a shell need not start Python at each tab.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module

from octavo.frontend.cli.parser import CommandParser

_EPILOG = """\
bash: eval "$(octavo completion bash)" in ~/.bashrc
zsh:  octavo completion zsh > "${fpath[1]}/_octavo", then a new shell
fish: octavo completion fish > ~/.config/fish/completions/octavo.fish
"""

_FILES = re.compile(r"FILE|DIR|PATH|MODEL|--(model|tokenizer|chat-template|uds|record-steps|.*(file|path|dir|certs))")
"""Placeholders of values that are files, and flags whose placeholder does not say so."""

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Flag:
    """A flag with its spellings."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...] = ()
    is_file: bool = False


@dataclass(frozen=True)
class Page:
    """What may follow a command: other commands, or flags."""

    words: tuple[str, ...]
    """Of the command, without "octavo": ("bench", "serve")."""
    help: str
    commands: tuple[tuple[str, str], ...] = ()
    flags: tuple[Flag, ...] = ()
    choices: tuple[str, ...] = ()
    """Of a positional argument."""
    takes_file: bool = False
    """A positional argument is a file, or may be one."""


def parser() -> CommandParser:
    """Return the flags of `octavo completion`."""
    parser = CommandParser(
        "octavo completion", "Print a script that completes octavo's command line.", "SHELL", epilog=_EPILOG
    )
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    return parser


def run(words: list[str]) -> int:
    """Print the script; return the exit code."""
    shell = parser().parse(words).shell
    print({"bash": bash, "zsh": zsh, "fish": fish}[shell](list(pages())), end="")  # noqa: T201
    return 0


def pages() -> Iterator[Page]:
    """Yield a page for every command, those that have others below them before these."""
    from octavo.frontend.cli.main import COMMANDS, Command

    def below(words: tuple[str, ...], text: str, commands: Sequence[Command]) -> Iterator[Page]:
        yield Page(words, text, tuple((command.name, command.help) for command in commands))
        for command in commands:
            path = (*words, command.name)
            if command.commands:
                yield from below(path, command.help, command.commands)
            else:
                yield _page(path, command.help, import_module(command.module).parser())

    yield from below((), "octavo", COMMANDS)


def _page(words: tuple[str, ...], text: str, parser: argparse.ArgumentParser) -> Page:
    flags = []
    choices: tuple[str, ...] = ()
    takes_file = False
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        values = tuple(str(value) for value in action.choices or ())
        takes_value = action.nargs != 0 and not isinstance(action, argparse.BooleanOptionalAction)
        is_file = takes_value and any(map(_FILES.fullmatch, (str(action.metavar), *action.option_strings)))
        if not action.option_strings:
            choices += values
            takes_file |= is_file
            continue
        is_help = "--help" in action.option_strings
        flags.append(
            Flag(tuple(action.option_strings), _plain(action.help), takes_value and not is_help, values, is_file)
        )
    return Page(words, text, flags=tuple(flags), choices=choices, takes_file=takes_file)


def _plain(text: str | None) -> str:
    """Return a flag's help as argparse would print it, in one line."""
    return " ".join((text or "").replace("%%", "%").split())


def bash(pages: Sequence[Page]) -> str:
    """Return a script for bash 4 and later; it needs no other package."""
    flag_cases, value_cases = [], []
    for page in pages:
        key = " ".join(page.words)
        flags = " ".join(name for flag in page.flags for name in flag.names)
        words = " ".join([*(name for name, _ in page.commands), *page.choices])
        bare = "files=1" if page.takes_file else f"words={_quote(words or flags)}"
        flag_cases.append(f"        {_quote(key)}) flags={_quote(flags)}; {bare} ;;")
        for flag in page.flags:
            if flag.takes_value:
                pattern = "|".join(_quote(f"{key} {name}") for name in flag.names)
                action = (
                    f"words={_quote(' '.join(flag.choices))}" if flag.choices else "files=1" if flag.is_file else ":"
                )
                value_cases.append(f"        {pattern}) {action} ;;")
    parents = " | ".join(_quote(" ".join(page.words)) for page in pages if page.commands)
    return _BASH.format(parents=parents, flags="\n".join(flag_cases), values="\n".join(value_cases))


_BASH = """\
# Completes octavo's command line; made by `octavo completion bash`.
_octavo() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command=
    local word words= flags= files= index
    COMPREPLY=()
    # bash takes "=" for a word of its own.
    if [[ $current == "=" ]]; then
        current=
    elif [[ $previous == "=" && COMP_CWORD -gt 1 ]]; then
        previous=${{COMP_WORDS[COMP_CWORD-2]}}
    fi
    for ((index = 1; index < COMP_CWORD; index++)); do
        word=${{COMP_WORDS[index]}}
        case $command in
        {parents}) [[ $word == -* ]] || command="${{command:+$command }}$word" ;;
        esac
    done
    case "$command $previous" in
{values}
        *) case $command in
{flags}
        esac
        [[ $current == -* ]] && words=$flags files= ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    if [[ -n $files && ${{#COMPREPLY[@]}} -eq 0 ]]; then
        compopt -o filenames
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -F _octavo octavo
"""


def zsh(pages: Sequence[Page]) -> str:
    """Return a script for zsh's completion system."""
    return "\n".join(
        [
            "#compdef octavo",
            "# Completes octavo's command line; made by `octavo completion zsh`.",
            *(line for page in pages for line in _zsh_function(page)),
            'if [[ $funcstack[1] == _octavo ]]; then _octavo "$@"; else compdef _octavo octavo; fi',
            "",
        ]
    )


def _zsh_name(words: Sequence[str]) -> str:
    return "_".join(["_octavo", *words])


def _zsh_function(page: Page) -> Iterator[str]:
    yield f"{_zsh_name(page.words)}() {{"
    if page.commands:
        yield "    local -a commands=("
        yield from (f"        {_quote(f'{name}:{text}')}" for name, text in page.commands)
        yield "    )"
        yield "    if ((CURRENT == 2)); then _describe command commands; return; fi"
        yield "    local word=$words[2]"
        yield "    shift words; ((CURRENT--))"
        yield "    case $word in"
        yield from (f"        {name}) {_zsh_name((*page.words, name))} ;;" for name, _ in page.commands)
        yield "    esac"
    else:
        yield "    _arguments \\"
        yield from (f"        {spec} \\" for flag in page.flags for spec in _zsh_specs(flag))
        values = f"({' '.join(page.choices)})" if page.choices else "_files"
        yield f"        '*:argument:{values}'"
    yield "}"


def _zsh_specs(flag: Flag) -> Iterator[str]:
    text = flag.help.replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    values = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.is_file else " "
    for name in flag.names:
        equals = "=" if flag.takes_value and name.startswith("--") else ""
        yield _quote(f"*{name}{equals}[{text}]" + (f":value:{values}" if flag.takes_value else ""))


def fish(pages: Sequence[Page]) -> str:
    """Return a script for fish."""
    lines = ["# Completes octavo's command line; made by `octavo completion fish`.", "complete -c octavo -f"]
    for page in pages:
        seen = [f"__fish_seen_subcommand_from {word}" for word in page.words]
        if page.commands:
            unseen = f"not __fish_seen_subcommand_from {' '.join(name for name, _ in page.commands)}"
            # `octavo serve` must not be taken for `octavo bench serve`, nor the other way round.
            place = "__fish_use_subcommand" if not page.words else "; and ".join([*seen, unseen])
            lines += [
                f"complete -c octavo -n {_fish_quote(place)} -a {_fish_quote(name)} -d {_fish_quote(text)}"
                for name, text in page.commands
            ]
            continue
        if len(page.words) == 1:
            seen.append("not __fish_seen_subcommand_from bench")
        condition = _fish_quote("; and ".join(seen))
        if page.choices:
            lines.append(f"complete -c octavo -n {condition} -a {_fish_quote(' '.join(page.choices))}")
        lines += [f"complete -c octavo -n {condition} {_fish_flag(flag)}" for flag in page.flags]
    return "\n".join([*lines, ""])


def _fish_flag(flag: Flag) -> str:
    names = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names]
    value = ""
    if flag.takes_value:
        value = f" -x -a {_fish_quote(' '.join(flag.choices))}" if flag.choices else " -r -F" if flag.is_file else " -x"
    return f"{' '.join(names)}{value} -d {_fish_quote(flag.help)}"


def _quote(text: str) -> str:
    """Return a text in single quotes, as bash and zsh read them."""
    return "'" + text.replace("'", "'\\''") + "'"


def _fish_quote(text: str) -> str:
    """Return a text in single quotes, as fish reads them."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

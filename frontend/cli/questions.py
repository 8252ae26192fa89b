"""Reads prompts from a terminal or a pipe."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from octavo.frontend.cli.errors import CommandError

PROMPT = "> "
CONTINUED = ". "

QUICK_STDIN = "-"
"""Argument that stands for all of standard input."""


def is_interactive() -> bool:
    """Whether standard input is a terminal."""
    return sys.stdin.isatty()


def typed_lines() -> Iterator[str]:
    """Yield typed lines until Ctrl-D, without blank lines.

    A backslash at the end of a line continues it on the next line. Ctrl-C clears the line.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a history and the arrow keys)
    parts: list[str] = []
    while True:
        try:
            line = input(CONTINUED if parts else PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D exits)")
            parts.clear()
            continue
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        text = "\n".join([*parts, line])
        parts.clear()
        if text.strip():
            yield text


def handle_typed_lines(answer: Callable[[str], object]) -> None:
    """Handle typed lines until Ctrl-D. A failed request is reported and does not end the loop."""
    for line in typed_lines():
        try:
            answer(line)
        except CommandError as error:
            print(f"error: {error.message}" + (f" ({error.hint})" if error.hint else ""), file=sys.stderr)


def piped_lines() -> Iterator[str]:
    """Yield the lines of standard input, without blank lines.

    Raises:
        CommandError: a line is not UTF-8.
    """
    for line in sys.stdin.buffer:
        if line.strip():
            yield _text(line).rstrip("\n")


def quick_text(text: str) -> str:
    """Return the text of the command line, or all of standard input for "-".

    Raises:
        CommandError: standard input is not UTF-8.
    """
    return _text(sys.stdin.buffer.read()) if text == QUICK_STDIN else text


def _text(data: bytes) -> str:
    """Decode bytes as UTF-8, regardless of the locale.

    Raises:
        CommandError: the bytes are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8 text: {error.reason}") from None

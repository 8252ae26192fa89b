"""Shared by `octavo chat` and `octavo complete`: flags, and printing a streamed answer."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from io import TextIOWrapper
from typing import Any, TypeAlias

from octavo.frontend.cli.api import DEFAULT_URL
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.env import Env

Events: TypeAlias = Generator[dict[str, Any], None, None]

_DIM, _PLAIN = "\033[2m", "\033[0m"

_CONTROL = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}
"""Replaces control characters in the model's text, which must not move the cursor or set the window title."""


@dataclass
class Answer:
    """One streamed answer. Times are on the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    """Time of the first text."""
    finished: float = 0.0
    text: str = ""
    num_tokens: int | None = None
    """Number of tokens by the server's usage; `None` if it sent none."""
    is_interrupted: bool = False
    """Whether it was stopped with Ctrl-C."""

    def render_stats(self) -> str:
        """Return the speed as one line."""
        total_s = self.finished - self.started
        if self.first is None:
            return f"[no text, {total_s:.2f} s]"
        stats = f"first text after {self.first - self.started:.2f} s, all after {total_s:.2f} s"
        if self.num_tokens is None:
            return f"[{stats}]"
        speed = f"{self.num_tokens / total_s:.1f} tokens/s" if total_s else ""
        return f"[{self.num_tokens} tokens, {stats}, {speed}]"


@dataclass(frozen=True)
class Piece:
    """A part of an answer."""

    text: str
    is_reasoning: bool = False


def client_parser(prog: str, description: str, epilog: str, *, quick: tuple[str, str]) -> CommandParser:
    """Return a parser with the flags that terminal clients share.

    Args:
        prog: the command, such as "octavo chat".
        description: the description of the command.
        epilog: text printed after the flags.
        quick: metavar and help of `--quick`.
    """
    parser = CommandParser(prog, description, epilog=epilog)
    metavar, meaning = quick
    parser.add_argument("-q", "--quick", metavar=metavar, help=f"{meaning} and exit; -: standard input")
    parser.add_argument("--stats", action="store_true", help="print the speed of each answer on standard error")
    add_connection_flags(parser)
    add_sampling_flags(parser)
    return parser


def add_connection_flags(parser: CommandParser) -> None:
    """Add the flags that select the server."""
    group = parser.add_named_group("server", "The server")
    group.add_argument(
        "--url",
        default=DEFAULT_URL,
        help=f"http://HOST:PORT, with or without /v1, or unix:PATH; default: {DEFAULT_URL}",
    )
    group.add_argument("--model-name", metavar="NAME", help="model name; default: the server's first model")
    group.add_argument(
        "--api-key", metavar="KEY", help="sent as the bearer token; default: OCTAVO_API_KEY, else VLLM_API_KEY"
    )


def add_sampling_flags(parser: CommandParser) -> None:
    """Add sampling flags. The server decides about flags that are not on the command line."""
    group = parser.add_named_group("sampling", "Sampling; the server decides what is not given")
    group.add_argument("--max-tokens", type=int, metavar="N", help="limit on the answer, in tokens")
    group.add_argument("--temperature", type=float, metavar="X", help="0: always the most likely token")
    group.add_argument(
        "--top-p", type=float, metavar="X", help="sample from the likeliest tokens up to this probability"
    )
    group.add_argument("--top-k", type=int, metavar="N", help="sample from this many of the most likely tokens")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text (repeatable)")
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="additional fields of the request"
    )


def api_key(options: argparse.Namespace) -> str | None:
    """Return the API key."""
    key: str | None = options.api_key
    return key or Env.read().api_key


def sampling_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the request fields that the flags set."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    return {**given, "stream_options": {"include_usage": True}, **options.extra_body}


def show(events: Events, pieces: Callable[[dict[str, Any]], Iterator[Piece]], *, has_stats: bool = False) -> Answer:
    """Print an answer as it arrives. Ctrl-C stops the answer, not the program.

    On a terminal, reasoning is dim and control characters are replaced. In a pipe, reasoning is omitted.

    Args:
        events: the stream, which is closed here.
        pieces: returns the pieces of text in an event.
        has_stats: whether to print the speed on standard error.

    Raises:
        CommandError: the server responds with an error, or the stream fails.
    """
    answer = Answer()
    screen = _Screen()
    try:
        with closing(events):
            for event in events:
                if usage := event.get("usage"):
                    answer.num_tokens = usage.get("completion_tokens")
                for piece in pieces(event):
                    answer.first = answer.first or time.monotonic()
                    if not piece.is_reasoning:
                        answer.text += piece.text  # recorded before printing: Ctrl-C arrives after the text was seen
                    screen.write(piece)
    except KeyboardInterrupt:
        answer.is_interrupted = True
    except CommandError:
        if answer.first is not None:  # no newline after an empty output
            screen.end()
        raise
    screen.end()
    answer.finished = time.monotonic()
    if has_stats:
        print(answer.render_stats(), file=sys.stderr)
    return answer


class _Screen:
    """Writes an answer to standard output."""

    def __init__(self) -> None:
        if isinstance(sys.stdout, TextIOWrapper):  # the locale may be unable to encode the answer
            sys.stdout.reconfigure(errors="replace")
        self._is_terminal = sys.stdout.isatty()
        self._is_dim = False
        self._ends_line = False

    def write(self, piece: Piece) -> None:
        if not self._is_terminal:
            if not piece.is_reasoning:
                self._put(piece.text)
            return
        if piece.is_reasoning != self._is_dim:
            self._is_dim = piece.is_reasoning
            self._put(_DIM if self._is_dim else f"{_PLAIN}\n")
        self._put(piece.text.translate(_CONTROL))

    def end(self) -> None:
        """End the line."""
        if self._is_dim:
            self._put(_PLAIN)
        if not self._ends_line:
            self._put("\n")

    def _put(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        self._ends_line = text.endswith("\n") if text else self._ends_line


def json_object(text: str) -> dict[str, Any]:
    """Read a flag's value as a JSON object, for argparse."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value

"""`octavo complete`: text completion with a running server, in a terminal or through pipes."""

import argparse
from collections.abc import Iterator
from typing import Any

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.parser import CommandParser
from octavo.frontend.cli.questions import QUICK_STDIN, handle_typed_lines, is_interactive, quick_text
from octavo.frontend.cli.terminal import (
    Answer,
    Piece,
    api_key,
    client_parser,
    sampling_fields,
    show,
)

EXIT_INTERRUPTED = 130

_PATH = "/v1/completions"

_EPILOG = """\
Each line is a prompt; a backslash at its end continues it. Ctrl-C stops an answer, Ctrl-D exits.
In a pipe, all of standard input is one prompt and only the continuation is printed:
  octavo complete --max-tokens 100 < beginning.txt >> beginning.txt
"""


def parser() -> CommandParser:
    """Return the flags of `octavo complete`."""
    quick = ("PROMPT", "continue this one text")
    parser = client_parser("octavo complete", "Continue a text on a running server.", _EPILOG, quick=quick)
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    return parser


def run(argv: list[str]) -> int:
    """Complete prompts until the input ends; return the exit code.

    Raises:
        CommandError: the server does not respond, or responds with an error.
    """
    options = parser().parse(argv)
    api = Api(options.url, api_key(options))
    model = api.model(options.model_name)
    if options.quick is None and is_interactive():
        print(f"{model} at {options.url} continues what you type. Ctrl-D exits.")
        handle_typed_lines(lambda line: _complete(api, model, line, options))
        return 0
    prompt = quick_text(QUICK_STDIN if options.quick is None else options.quick)
    return EXIT_INTERRUPTED if _complete(api, model, prompt, options).is_interrupted else 0


def _complete(api: Api, model: str, prompt: str, options: argparse.Namespace) -> Answer:
    body = {"model": model, "prompt": prompt, "echo": options.echo, **sampling_fields(options)}
    return show(api.stream(_PATH, body), _pieces, has_stats=options.stats)


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    for choice in event.get("choices", []):
        if text := choice.get("text"):
            yield Piece(text)

"""`octavo chat`: a conversation with a running server, in a terminal or through pipes.

The API is stateless: the whole conversation is sent with each message.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.parser import CommandParser
from octavo.frontend.cli.questions import handle_typed_lines, is_interactive, piped_lines, quick_text
from octavo.frontend.cli.terminal import (
    Answer,
    Piece,
    api_key,
    client_parser,
    sampling_fields,
    show,
)

EXIT_INTERRUPTED = 130

_PATH = "/v1/chat/completions"

_EPILOG = """\
Each line is a message; a backslash at its end continues it. Ctrl-C stops an answer, Ctrl-D exits.
/clear starts a new conversation, /retry sends the last message again.
In a pipe, every line is a message and only the answers are printed:
  printf 'My name is Ada.\\nWhat is my name?\\n' | octavo chat
  octavo chat -q - < question.txt
"""


def parser() -> CommandParser:
    """Return the flags of `octavo chat`."""
    quick = ("MESSAGE", "send this one message")
    parser = client_parser("octavo chat", "Talk to a model on a running server.", _EPILOG, quick=quick)
    parser.add_argument("--system-prompt", metavar="TEXT", help="system message at the start of the conversation")
    return parser


def run(argv: list[str]) -> int:
    """Chat until the input ends; return the exit code.

    Raises:
        CommandError: the server does not respond, or responds with an error.
    """
    options = parser().parse(argv)
    chat = Conversation(options)
    if options.quick is not None:
        return EXIT_INTERRUPTED if chat.ask(quick_text(options.quick)).is_interrupted else 0
    if not is_interactive():
        return EXIT_INTERRUPTED if any(chat.ask(line).is_interrupted for line in piped_lines()) else 0
    print(f"Talking to {chat.model} at {options.url}. Ctrl-C stops an answer, Ctrl-D exits.")
    handle_typed_lines(chat.handle_line)
    return 0


class Conversation:
    """The messages so far, and the server.

    Raises:
        CommandError: the server does not respond.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._api = Api(options.url, api_key(options))
        self._system = options.system_prompt
        self._fields = sampling_fields(options)
        self._has_stats = options.stats
        self.model = self._api.model(options.model_name)
        self.messages: list[dict[str, Any]] = []
        self.clear()

    def handle_line(self, line: str) -> None:
        """Run a line that starts with a slash as a command; send any other as a message.

        Raises:
            CommandError: the server responds with an error.
        """
        command = {"/clear": self.clear, "/retry": self.retry}.get(line.strip())
        if command:
            command()
        else:
            self.ask(line)

    def clear(self) -> None:
        """Drop all messages except the system prompt."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def retry(self) -> None:
        """Send the last message again, if there is one."""
        while self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if self.messages and self.messages[-1]["role"] == "user":
            self.ask(self.messages.pop()["content"])

    def ask(self, question: str) -> Answer:
        """Send a message and print the answer. After Ctrl-C the conversation keeps the partial answer.

        Raises:
            CommandError: the server responds with an error; the message is dropped.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, **self._fields}
        answer = show(self._api.stream(_PATH, body), _pieces, has_stats=self._has_stats)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


def _pieces(event: dict[str, Any]) -> Iterator[Piece]:
    for choice in event.get("choices", []):
        delta = choice.get("delta", {})
        # Other servers still use the former name.
        if reasoning := delta.get("reasoning") or delta.get("reasoning_content"):
            yield Piece(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            yield Piece(text)

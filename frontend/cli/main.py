"""`main`: finds the command, runs it, and turns errors into one last line and an exit code.

Exit codes: 0 done (also after Ctrl-C on a server that was ready), 1 failed (the last line says why),
2 the command line is wrong, 128 + N ended by signal N (a server: before it was ready).
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from octavo import __version__
from octavo.protocol.errors import OctavoError, StartupError

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128


@dataclass(frozen=True)
class Command:
    """A command; its module is imported when it is called."""

    name: str
    help: str
    module: str = ""
    """Has functions `parser() -> CommandParser` and `run(words) -> int`; "": it has commands below it."""
    commands: "tuple[Command, ...]" = ()


BENCHMARKS: tuple[Command, ...] = (
    Command("serve", "load on a running server: throughput and latencies", "octavo.frontend.cli.bench.serve"),
    Command("throughput", "an engine's throughput, offline", "octavo.frontend.cli.bench.throughput"),
    Command("latency", "one batch after another, offline", "octavo.frontend.cli.bench.latency"),
    Command("startup", "from the command to the first token", "octavo.frontend.cli.bench.startup"),
    Command("chaos", "kills processes under load and compares every answer", "octavo.frontend.cli.bench.chaos.command"),
)

COMMANDS: tuple[Command, ...] = (
    Command("serve", "start an OpenAI-compatible server for a model", "octavo.frontend.cli.serve"),
    Command("chat", "talk to a model on a running server", "octavo.frontend.cli.chat"),
    Command("complete", "have a running server go on with a text", "octavo.frontend.cli.complete"),
    Command("run-batch", "answer the requests of a file into another file", "octavo.frontend.cli.run_batch"),
    Command("bench", "measure a server or an engine", commands=BENCHMARKS),
    Command("collect-env", "tell what a report about a problem should say", "octavo.frontend.cli.collect_env"),
    Command("completion", "print a script that completes this command line", "octavo.frontend.cli.completion"),
    Command("keygen", "make keys for engines and clients on several machines", "octavo.frontend.cli.keygen"),
    Command("build-kernels", "compile the CPU kernels ahead of the first start", "octavo.frontend.cli.build_kernels"),
)

_MOTTO = "Serves large language models: the same request gives the same tokens, bit for bit, in any batch."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: without the program's name; None: `sys.argv`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ("-V", "--version"):
        print(f"octavo {__version__}")  # noqa: T201
        return EXIT_OK
    return _dispatch("octavo", COMMANDS, words)


def _dispatch(prog: str, commands: Sequence[Command], words: list[str]) -> int:
    """Run the command that the first word names."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage(prog, commands))  # noqa: T201  (a command's output)
        return EXIT_OK if words else EXIT_USAGE
    command = next((command for command in commands if command.name == words[0]), None)
    if command is None:
        return _unknown(prog, commands, words[0])
    if command.commands:
        return _dispatch(f"{prog} {command.name}", command.commands, words[1:])
    run: Callable[[list[str]], int] = import_module(command.module).run
    return _guarded(run, words[1:])


def _unknown(prog: str, commands: Sequence[Command], word: str) -> int:
    import difflib

    names = [command.name for command in commands]
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"{prog} knows: {', '.join(names)}"
    return fail(f"unknown command {word!r}", hint, EXIT_USAGE)


def usage(prog: str = "octavo", commands: Sequence[Command] = COMMANDS) -> str:
    """Return the text of `octavo --help`, or of a command that has others below it."""
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:<{width}}  {command.help}" for command in commands]
    return "\n".join(
        [
            f"usage: {prog} COMMAND [ARGUMENTS]",
            "",
            *([_MOTTO, ""] if commands is COMMANDS else []),
            "commands:",
            *rows,
            "",
            f"{prog} COMMAND --help explains a command; octavo --version tells the version.",
        ]
    )


def fail(message: str, hint: str = "", code: int = EXIT_FAILED) -> int:
    """Print the root cause as the last line and return the exit code."""
    print(f"octavo: error: {message}" + (f" ({hint})" if hint else ""), file=sys.stderr)  # noqa: T201
    return code


def _guarded(run: Callable[[list[str]], int], words: list[str]) -> int:
    try:
        return run(words)
    except StartupError as error:
        if logging.getLogger("octavo").isEnabledFor(logging.DEBUG) and error.details:
            print(error.details, file=sys.stderr)  # noqa: T201
        return fail(error.message, error.hint)
    except OctavoError as error:
        return fail(str(error), getattr(error, "hint", ""))
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output (`| head`) has left. Python would complain once more when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + signal.SIGPIPE

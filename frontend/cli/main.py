"""`main`: finds and runs the command, and turns errors into a last line and an exit code.

Exit codes: 0 success (also after Ctrl-C on a server that was ready), 1 failure (the last line says why),
2 wrong command line, 128 + N ended by signal N (a server: before it was ready).
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from octavo.protocol.errors import OctavoError, StartupError
from octavo.protocol.version import __version__

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_SIGNAL = 128


@dataclass(frozen=True)
class Command:
    """A command. Its module is imported only when the command runs."""

    name: str
    help: str
    module: str = ""
    """Module with the functions `parser() -> CommandParser` and `run(argv) -> int`; "" if the command has
    subcommands."""
    commands: "tuple[Command, ...]" = ()


BENCHMARKS: tuple[Command, ...] = (
    Command("serve", "benchmark a running server: throughput and latencies", "octavo.frontend.cli.bench.serve"),
    Command("throughput", "offline throughput of an engine", "octavo.frontend.cli.bench.throughput"),
    Command("latency", "offline latency of one batch after another", "octavo.frontend.cli.bench.latency"),
    Command("startup", "time from the command to the first token", "octavo.frontend.cli.bench.startup"),
    Command("chaos", "kill processes under load and compare every answer", "octavo.frontend.cli.bench.chaos.command"),
)

ADMIN: tuple[Command, ...] = (
    Command("state", "show the load, the weights and the counters of an engine", "octavo.frontend.cli.admin.state"),
    Command("list", "list the in-flight requests of an engine", "octavo.frontend.cli.admin.list_requests"),
    Command("abort", "end requests", "octavo.frontend.cli.admin.abort"),
    Command("drain", "take no new requests and finish those there are", "octavo.frontend.cli.admin.drain"),
    Command("resume", "take requests again", "octavo.frontend.cli.admin.resume"),
    Command("reset-caches", "drop all cached prefixes", "octavo.frontend.cli.admin.reset_caches"),
    Command("log-level", "change what the core logs", "octavo.frontend.cli.admin.log_level"),
    Command("engines", "list, add, drain, remove and replace engines", "octavo.frontend.cli.admin.engines"),
)

COMMANDS: tuple[Command, ...] = (
    Command("serve", "start an OpenAI-compatible server for a model", "octavo.frontend.cli.serve"),
    Command("chat", "chat with a model on a running server", "octavo.frontend.cli.chat"),
    Command("complete", "continue a text on a running server", "octavo.frontend.cli.complete"),
    Command("run-batch", "run a file of requests into a file of results", "octavo.frontend.cli.run_batch"),
    Command("verify", "compute saved answers again and compare every bit", "octavo.frontend.cli.verify"),
    Command("bench", "benchmark a server or an engine", commands=BENCHMARKS),
    Command("admin", "operate a running server or engine", commands=ADMIN),
    Command("quantize", "write a checkpoint with fewer bits", "octavo.frontend.cli.quantize"),
    Command("collect-env", "print information for a bug report", "octavo.frontend.cli.collect_env"),
    Command("completion", "print a script that completes this command line", "octavo.frontend.cli.completion"),
    Command("keygen", "create keys for engines and clients on different machines", "octavo.frontend.cli.keygen"),
    Command("build-kernels", "compile the CPU kernels ahead of the first start", "octavo.frontend.cli.build_kernels"),
)

_MOTTO = "Serves large language models: the same request gives the same tokens, bit for bit, in any batch."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: the arguments without the program name; None: `sys.argv`.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv and argv[0] in ("-V", "--version"):
        print(f"octavo {__version__}")
        return EXIT_OK
    return _dispatch("octavo", COMMANDS, argv)


def _dispatch(prog: str, commands: Sequence[Command], argv: list[str]) -> int:
    """Run the command named by the first argument."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage(prog, commands))
        return EXIT_OK if argv else EXIT_USAGE
    command = next((command for command in commands if command.name == argv[0]), None)
    if command is None:
        return _unknown(prog, commands, argv[0])
    if command.commands:
        return _dispatch(f"{prog} {command.name}", command.commands, argv[1:])
    run: Callable[[list[str]], int] = import_module(command.module).run
    return _guarded(run, argv[1:])


def _unknown(prog: str, commands: Sequence[Command], word: str) -> int:
    import difflib

    names = [command.name for command in commands]
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"{prog} knows: {', '.join(names)}"
    return fail(f"unknown command {word!r}", hint, EXIT_USAGE)


def usage(prog: str = "octavo", commands: Sequence[Command] = COMMANDS) -> str:
    """Return the help text of `octavo` or of a command with subcommands."""
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
            f"{prog} COMMAND --help explains a command; octavo --version prints the version.",
        ]
    )


def fail(message: str, hint: str = "", code: int = EXIT_FAILED) -> int:
    """Print the root cause as the last line and return the exit code."""
    print(f"octavo: error: {message}" + (f" ({hint})" if hint else ""), file=sys.stderr)
    return code


def _guarded(run: Callable[[list[str]], int], argv: list[str]) -> int:
    try:
        return run(argv)
    except StartupError as error:
        if logging.getLogger("octavo").isEnabledFor(logging.DEBUG) and error.details:
            print(error.details, file=sys.stderr)
        return fail(error.message, error.hint)
    except OctavoError as error:
        return fail(str(error), getattr(error, "hint", ""))
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output (such as `| head`) has exited. Python would raise again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + signal.SIGPIPE

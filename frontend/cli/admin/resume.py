"""`octavo admin resume`: a draining engine accepts requests again."""

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.admin import DrainEngine


def parser() -> CommandParser:
    """Return the flags of `octavo admin resume`."""
    parser = CommandParser("octavo admin resume", "Let an engine that drains take requests again.")
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """End the drain; return the exit code.

    Raises:
        OctavoError: an engine does not respond.
    """
    call_engines(parser().parse(argv), DrainEngine(is_draining=False))
    print("accepting requests")
    return 0

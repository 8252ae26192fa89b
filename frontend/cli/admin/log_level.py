"""`octavo admin log-level LEVEL`: changes the log level of an engine's core."""

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.admin import LOG_LEVELS, SetLogLevel

_DESCRIPTION = """\
Change the log level of an engine's core. Its workers and the servers in front of it keep theirs; a core that replaces
it starts with --log-level again."""


def parser() -> CommandParser:
    """Return the flags of `octavo admin log-level`."""
    parser = CommandParser("octavo admin log-level", _DESCRIPTION, "LEVEL [FLAG ...]")
    parser.add_argument("level", metavar="LEVEL", type=str.upper, choices=LOG_LEVELS, help=", ".join(LOG_LEVELS))
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Change the level; return the exit code.

    Raises:
        OctavoError: an engine does not respond.
    """
    options = parser().parse(argv)
    call_engines(options, SetLogLevel(options.level))
    print(f"the log level is {options.level}")
    return 0

"""`octavo admin abort`: ends requests of an engine."""

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.admin import AbortRequests, RequestCount

_DESCRIPTION = """\
End requests with finish reason "abort". Their clients get what was generated so far."""


def parser() -> CommandParser:
    """Return the flags of `octavo admin abort`."""
    parser = CommandParser("octavo admin abort", _DESCRIPTION, "REQUEST ... [FLAG ...]")
    parser.add_argument("requests", metavar="REQUEST", nargs="*", help="as octavo admin list shows it")
    parser.add_argument("--all", action="store_true", help="end every request")
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Abort the requests and print their number; return the exit code.

    Raises:
        CommandError: none of the requests is live.
        OctavoError: an engine does not respond.
    """
    command = parser()
    options = command.parse(argv)
    if bool(options.requests) == options.all:
        command.error("name requests, or give --all")
    results = call_engines(options, AbortRequests(None if options.all else options.requests))
    count = sum(one.count for (one,) in results.values() if isinstance(one, RequestCount))
    if not count and options.requests:
        raise CommandError("no such request is live", "octavo admin list shows those that are")
    print(f"aborted {count} requests")
    return 0

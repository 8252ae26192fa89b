"""`octavo admin drain`: an engine accepts no new requests, and finishes those it has."""

import time

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.admin import DrainEngine, ListRequests, RequestCount, RequestRows

_DESCRIPTION = """\
Let an engine take no new requests and finish those it has. New ones are rejected with 503 and Retry-After until
`octavo admin resume`. The engine of a server that has several is better drained by `octavo admin engines drain`, which
sends its requests to the others."""

POLL_INTERVAL_S = 0.5


def parser() -> CommandParser:
    """Return the flags of `octavo admin drain`."""
    parser = CommandParser("octavo admin drain", _DESCRIPTION)
    parser.add_argument("--wait", action="store_true", help="return when no request is left")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="with --wait: fail after it; default: never")
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Drain the engine; return the exit code.

    Raises:
        CommandError: requests are left after the timeout.
        OctavoError: an engine does not respond.
    """
    command = parser()
    options = command.parse(argv)
    if options.timeout is not None and not options.wait:
        command.error("--timeout needs --wait")
    results = call_engines(options, DrainEngine())
    count = sum(one.count for (one,) in results.values() if isinstance(one, RequestCount))
    deadline_s = float("inf") if options.timeout is None else time.monotonic() + options.timeout
    while options.wait and count:
        if time.monotonic() >= deadline_s:
            raise CommandError(
                f"{count} requests are left; the engine still drains",
                "end them with octavo admin abort --all, or wait again",
            )
        time.sleep(POLL_INTERVAL_S)
        rows = call_engines(options, ListRequests(0))
        count = sum(one.num_live for (one,) in rows.values() if isinstance(one, RequestRows))
    print(f"draining: {count} requests are left")
    return 0

"""`octavo admin reset-caches`: clears an engine's prefix cache."""

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.events import BoolResult
from octavo.protocol.requests import ResetPrefixCache

_DESCRIPTION = "Drop every cached prefix of an engine, unless requests use the cache at the moment."


def parser() -> CommandParser:
    """Return the flags of `octavo admin reset-caches`."""
    parser = CommandParser("octavo admin reset-caches", _DESCRIPTION)
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Clear the cache; return the exit code.

    Raises:
        CommandError: the cache is in use.
        OctavoError: an engine does not respond.
    """
    for address, (result,) in call_engines(parser().parse(argv), ResetPrefixCache()).items():
        if result != BoolResult(True):
            raise CommandError(
                f"the prefix cache of {address} is in use by running requests", "try again after octavo admin drain"
            )
    print("the prefix cache is empty")
    return 0

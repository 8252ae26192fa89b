"""The engines that an `octavo admin` command calls over their sockets: flags, discovery and calls."""

import argparse
from collections.abc import Callable
from pathlib import Path

from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.curve import read_client_keys
from octavo.protocol.env import Env
from octavo.protocol.events import UtilityResult
from octavo.protocol.requests import Utility


def add_engine_flags(parser: CommandParser) -> None:
    """Add the flags that select the engines."""
    group = parser.add_named_group("engine", "The engine")
    group.add_argument(
        "--address",
        help="ipc:// or tcp:// address, several separated by commas; octavo serve logs it. Default: the engine that "
        "this user runs on this machine",
    )
    group.add_argument(
        "--client-secret-key-file", metavar="FILE", help="own secret key, for an engine on another machine"
    )
    group.add_argument("--engine-public-key-file", metavar="FILE", help="public key of that engine")


def call_engines(
    options: argparse.Namespace, *utilities: Utility, takes_all: bool = False
) -> dict[str, list[UtilityResult]]:
    """Make calls to each engine, one after another; return the results by address.

    Args:
        options: options of the flags from `add_engine_flags`.
        utilities: the calls.
        takes_all: whether all engines of this user are called without `--address`; otherwise there must be exactly one.

    Raises:
        CommandError: no engine was found, or there are several and the user must choose one.
        OctavoError: an engine does not respond, or a call failed.
    """
    # Imported here because --help needs no event loop.
    from octavo.frontend.cli.admin.engine_calls import call_engine

    keys = read_client_keys(options.client_secret_key_file, options.engine_public_key_file)
    addresses = options.address.split(",") if options.address else _own_addresses(takes_all=takes_all)
    return {address: call_engine(address, keys, utilities) for address in addresses}


def print_by_engine(results: dict[str, list[UtilityResult]], render: Callable[[list[UtilityResult]], str]) -> None:
    """Print the results of each engine, under its address if there are several."""
    for address, of_engine in results.items():
        title = f"{address}:\n" if len(results) > 1 else ""
        print(title + render(of_engine))


def _own_addresses(*, takes_all: bool) -> list[str]:
    """Return the addresses of the engines of this user."""
    directory = Env.read().runtime_dir
    # A replaced engine leaves links to its replacement.
    sockets = {path.resolve(): path for path in sorted(directory.glob("octavo-*/core")) if _is_reachable(path)}
    addresses = [f"ipc://{path}" for path in sockets.values()]
    if not addresses:
        raise CommandError(
            f"no engine of this user has a socket under {directory}", "name one with --address; octavo serve logs it"
        )
    if len(addresses) > 1 and not takes_all:
        raise CommandError(
            f"this user runs {len(addresses)} engines: {', '.join(addresses)}",
            "choose with --address; several addresses are separated by commas",
        )
    return addresses


def _is_reachable(path: Path) -> bool:
    try:
        return path.is_socket()
    except OSError:  # a directory of another user
        return False

"""The server of an `octavo admin` command: its flags, and a client with the admin key."""

import argparse

from octavo.frontend.cli.api import DEFAULT_URL, Api
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.env import Env


def add_server_flags(parser: CommandParser) -> None:
    """Add the flags that select the server."""
    group = parser.add_named_group("server", "The server")
    group.add_argument(
        "--url", default=DEFAULT_URL, help=f"http://HOST:PORT or unix:PATH of the server; default: {DEFAULT_URL}"
    )
    group.add_argument(
        "--served-model", metavar="NAME", help="which model's engines, if the server has joined those of several"
    )
    group.add_argument("--admin-api-key", metavar="KEY", help="the server's admin key; default: OCTAVO_ADMIN_API_KEY")


def admin_api(options: argparse.Namespace) -> Api:
    """Return an HTTP client for the server.

    Raises:
        CommandError: no admin key was given.
    """
    key = options.admin_api_key or Env.read().admin_api_key
    if not key:
        raise CommandError(
            "the server's admin key is needed", "give it with --admin-api-key or OCTAVO_ADMIN_API_KEY, as to the server"
        )
    return Api(options.url, key)

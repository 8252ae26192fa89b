"""`octavo admin engines ACTION`: lists and changes the engines of a running server."""

import argparse
from typing import Any
from urllib.parse import urlencode

from octavo.frontend.cli.admin.connection import add_server_flags, admin_api
from octavo.frontend.cli.admin.table import table
from octavo.frontend.cli.parser import CommandParser

_PATH = "/v1/engines"

_ACTIONS = ("list", "add", "drain", "resume", "remove", "replace")

_WITH_INDEX = ("drain", "resume", "remove")

_DESCRIPTION = """\
Show and change the engines of a running server, which needs --admin-api-key. Every action prints the engines
afterwards; it returns when it is done, and goes on if you interrupt it."""

_EPILOG = """\
  list            all engines with their states
  add             start an engine, or join the one at --address
  drain INDEX     send it no new requests, and wait until it has none
  resume INDEX    send requests again to an engine that drains
  remove INDEX    drain it, disconnect, and stop it if the server has started it
  replace         replace all engines one by one, with the weights of --model; requests in flight finish
"""


def parser() -> CommandParser:
    """Return the flags of `octavo admin engines`."""
    parser = CommandParser("octavo admin engines", _DESCRIPTION, "ACTION [INDEX] [FLAG ...]", _EPILOG)
    parser.add_argument("action", metavar="ACTION", choices=_ACTIONS, help=", ".join(_ACTIONS))
    parser.add_argument("index", metavar="INDEX", type=int, nargs="?", help="of the engine, as list shows it")
    parser.add_argument("--address", help="add: of a running engine")
    parser.add_argument(
        "--engine-public-key-file", metavar="FILE", help="add: public key of an engine on another machine"
    )
    parser.add_argument("--model", help="replace: directory, .gguf file or hub id; default: the configured model")
    parser.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="drain, remove: other engines continue the requests after it"
    )
    add_server_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Execute an action and print the engines; return the exit code.

    Raises:
        CommandError: the server does not respond, or responds with an error.
    """
    options = _checked(parser(), argv)
    api = admin_api(options)
    is_list = options.action == "list"
    query = f"?{urlencode({'model': options.served_model})}" if options.served_model else ""
    engines = api.get(_PATH + query) if is_list else api.post(f"{_PATH}/{options.action}{query}", _body(options))
    print(_table(engines["data"]))
    return 0


def _checked(parser: CommandParser, argv: list[str]) -> argparse.Namespace:
    """Return the arguments. If they contradict each other, print one line and exit with code 2."""
    options = parser.parse(argv)
    action = options.action
    if (options.index is None) == (action in _WITH_INDEX):
        parser.error(f"{action} needs an INDEX" if action in _WITH_INDEX else f"{action} takes no INDEX")
    allowed = {"add": ("address", "engine_public_key_file"), "replace": ("model",)}
    allowed |= {"drain": ("timeout",), "remove": ("timeout",)}
    for name in ("address", "engine_public_key_file", "model", "timeout"):
        if getattr(options, name) is not None and name not in allowed.get(action, ()):
            parser.error(f"--{name.replace('_', '-')} does not go with {action}")
    return options


def _body(options: argparse.Namespace) -> dict[str, Any]:
    names = ("index", "address", "engine_public_key_file", "model", "timeout")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _table(engines: list[dict[str, Any]]) -> str:
    """Return the engines as a table."""
    rows = [["ENGINE", "STATE", "RUNNING", "WAITING", "WEIGHTS", "MODEL", "ADDRESS"]]
    for engine in engines:
        state = engine["state"] + (f" ({engine['reason']})" if engine["reason"] else "")
        counts = [str(engine["num_running"]), str(engine["num_waiting"])]
        rows.append([str(engine["index"]), state, *counts, engine["weights"][:8], engine["model"], engine["address"]])
    return table(rows)

"""`octavo keygen NAME`: creates a key pair for an engine or for a client on another machine."""

from pathlib import Path

from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.curve import write_pair

_DESCRIPTION = """\
Create a key pair for tcp:// connections between an engine and applications on other machines. Each side has its own:
give the public NAME.key to the other side and keep NAME.key_secret private."""


def parser() -> CommandParser:
    """Return the flags of `octavo keygen`."""
    parser = CommandParser("octavo keygen", _DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="name of the files, after the key's owner: engine, batch-host")
    parser.add_argument("--directory", metavar="DIR", default=".", help="directory; default: the current one")
    return parser


def run(argv: list[str]) -> int:
    """Write the files and print how to use them; return the exit code.

    Raises:
        ConfigError: a file exists, or cannot be written.
    """
    options = parser().parse(argv)
    public, secret = write_pair(Path(options.directory), options.name)
    print(f"{public}  public: give it to the other side\n{secret}  secret: keep it")
    return 0

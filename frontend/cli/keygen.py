"""`octavo keygen NAME`: a pair of keys for an engine, or a client of one, on another machine."""

from pathlib import Path

from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.curve import write_pair

_DESCRIPTION = """\
Makes a pair of keys for tcp:// connections between an engine and applications on other machines. Both sides have
one: NAME.key is public and goes to the other side, NAME.key_secret stays where it is and is nobody else's business."""


def parser() -> CommandParser:
    """Return the flags of `octavo keygen`."""
    parser = CommandParser("octavo keygen", _DESCRIPTION)
    parser.add_argument("name", metavar="NAME", help="of the files; say who has the key: engine, batch-host")
    parser.add_argument("--directory", metavar="DIR", default=".", help="where they are written; default: here")
    return parser


def run(words: list[str]) -> int:
    """Write the files and say what they are for; return the exit code.

    Raises:
        ConfigError: a file is there already, or cannot be written.
    """
    options = parser().parse(words)
    public, secret = write_pair(Path(options.directory), options.name)
    print(f"{public}  public: give it to the other side\n{secret}  secret: keep it")  # noqa: T201
    return 0

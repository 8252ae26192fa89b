"""`octavo admin list`: shows the in-flight requests of an engine."""

from octavo.frontend.cli.admin.engine_socket import add_engine_flags, call_engines, print_by_engine
from octavo.frontend.cli.admin.table import table
from octavo.frontend.cli.parser import CommandParser
from octavo.protocol.admin import MAX_ROWS, ListRequests, RequestRow, RequestRows
from octavo.protocol.events import UtilityResult

_DESCRIPTION = """\
Show the in-flight requests of an engine, from all servers and applications that are connected to it. It shows no text
and no tokens."""


def parser() -> CommandParser:
    """Return the flags of `octavo admin list`."""
    parser = CommandParser("octavo admin list", _DESCRIPTION)
    parser.add_argument("--limit", type=int, default=1000, help=f"most rows, up to {MAX_ROWS}; default: 1000")
    add_engine_flags(parser)
    return parser


def run(argv: list[str]) -> int:
    """Print the requests; return the exit code.

    Raises:
        OctavoError: an engine does not respond.
    """
    options = parser().parse(argv)
    print_by_engine(call_engines(options, ListRequests(options.limit), takes_all=True), _render)
    return 0


def _render(results: list[UtilityResult]) -> str:
    (rows,) = results
    assert isinstance(rows, RequestRows), "the result of ListRequests"
    header = ["REQUEST", "STATE", "PROMPT", "CACHED", "OUTPUT", "MAX", "PREEMPTED", "AGE", "CLIENT"]
    lines = [table([header, *(_cells(row) for row in rows.requests)])]
    if num_hidden := rows.num_live - len(rows.requests):
        lines.append(f"... and {num_hidden} more: raise --limit to see them")
    if rows.is_draining:
        lines.append("the engine drains: it takes no new requests until octavo admin resume")
    return "\n".join(lines)


def _cells(row: RequestRow) -> list[str]:
    numbers = (row.num_prompt_tokens, row.num_cached_tokens, row.num_output_tokens, row.max_tokens, row.num_preemptions)
    return [row.request_id, row.state, *map(str, numbers), f"{row.age_s:.1f} s", row.client]

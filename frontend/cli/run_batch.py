"""`octavo run-batch`: runs a file of requests on a new engine, and writes the results to another file.

Requests go through the server's routes. Running the same command again resumes an incomplete batch.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from octavo.frontend.batch.lines import BadLine, BatchRequest, BatchResult, read_lines
from octavo.frontend.batch.remote import fetch, is_url, local_name, put
from octavo.frontend.batch.results_file import ResultsFile, StandardOutput
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser, config_parser, configurations
from octavo.frontend.cli.start_log import start_log
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import set_default
from octavo.protocol.errors import EngineDeadError

STANDARD = "-"
"""Argument that stands for standard input or output."""

IN_FLIGHT_PER_SLOT = 2
"""Number of in-flight requests per sequence of a full batch, so that one is waiting whenever another ends."""

_DESCRIPTION = """\
Run the requests of a file in the format of OpenAI's batches: one JSON object per line with custom_id, method, url and
body. Results are written as they become ready; custom_id identifies them. Running the same command again resumes an
incomplete batch, however the last run ended."""


def parser() -> FlagParser:
    """Return the flags of `octavo run-batch`."""
    parser = config_parser("octavo run-batch", _DESCRIPTION)
    group = parser.add_named_group("batch", "The batch")
    group.add_argument(
        "-i", "--input-file", metavar="FILE", required=True, help="requests: a file or a URL; -: standard input"
    )
    group.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        required=True,
        help="results: a file, or a URL that takes PUT; -: standard output",
    )
    group.add_argument(
        "--max-inflight",
        type=int,
        metavar="N",
        help="limit on requests in flight; default: twice --max-num-seqs",
    )
    group.add_argument(
        "--return-receipts",
        action="store_true",
        help="results have receipts and their requests: octavo verify computes them again",
    )
    group.add_argument("--overwrite", action="store_true", help="discard the results in an existing output file")
    return parser


def run(argv: list[str]) -> int:
    """Run every line that has no result; return the exit code.

    Raises:
        CommandError: a file cannot be read or written, or a flag does not apply.
        StartupError: the engine cannot start; holds the root cause.
        EngineDeadError: the engine died; results so far are kept.
    """
    settings = parser().parse_settings(argv, may_join=True)
    if settings.get("join"):
        raise CommandError("a batch runs its own engine: remove --join and name a MODEL")
    paths = settings.pop("input_file"), settings.pop("output_file")
    max_in_flight = settings.pop("max_inflight", None)
    if max_in_flight is not None and max_in_flight < 1:
        raise CommandError("--max-inflight must be 1 or more")
    starts_over, has_receipts = settings.pop("overwrite", False), settings.pop("return_receipts", False)
    start_log(str(settings.get("log_level") or "WARNING"), settings.get("log_config_file"))
    engine, server = configurations(settings)
    # Results for a URL are first collected in a file. Its name is derived from the URL, so a repeated command finds it.
    path = Path(local_name(paths[1]) if is_url(paths[1]) else paths[1])
    with (
        _open_input(paths[0]) as source,
        nullcontext(StandardOutput()) if paths[1] == STANDARD else ResultsFile(path, starts_over=starts_over) as sink,
    ):
        num_lines = _check(source, sink)
        batch = Batch(source, sink, num_lines, has_receipts=has_receipts)
        if batch.num_left:
            batch.run(engine, server, max_in_flight)
        print(batch.render(), file=sys.stderr)
    if is_url(paths[1]):
        put(path, paths[1])
        path.unlink()
    return 0


class Batch:
    """A batch: its requests, the results so far, and the run for the rest.

    Args:
        source: the requests, positioned at the start.
        sink: receives the results.
        num_lines: number of requests.
        has_receipts: whether results have receipts.
    """

    def __init__(
        self, source: BinaryIO, sink: ResultsFile | StandardOutput, num_lines: int, *, has_receipts: bool = False
    ) -> None:
        self._source = source
        self._sink = sink
        self._num_lines = num_lines
        self._has_receipts = has_receipts
        self._num_before = len(sink.done)
        self._num_written = 0
        self._num_failed = sink.num_failed

    @property
    def num_left(self) -> int:
        """Number of lines without a result."""
        return self._num_lines - self._num_before - self._num_written

    def render(self) -> str:
        """Return a one-line summary."""
        before = f" ({self._num_before} of them in earlier runs)" if self._num_before else ""
        return f"{self._num_lines} lines done{before}, {self._num_failed} with an error"

    def run(self, engine: EngineConfig, server: ServerConfig, max_in_flight: int | None) -> None:
        """Run the lines that have no result.

        Raises:
            StartupError: the engine cannot start.
            EngineDeadError: the engine died.
        """
        # Imported late because `--help` and completion do not need it.
        import asyncio

        import uvloop

        set_default("TOKENIZERS_PARALLELISM", "false")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(engine, server, max_in_flight))

    async def _run(self, config: EngineConfig, server: ServerConfig, max_in_flight: int | None) -> None:
        # Imported late: these imports are slow.
        from tqdm import tqdm

        from octavo.frontend.batch.own_engine import serving
        from octavo.frontend.batch.runner import answer_lines, one_by_one

        async with serving(config, server) as (client, app):
            limit = max_in_flight or IN_FLIGHT_PER_SLOT * client.facts.max_num_seqs
            with tqdm(total=self._num_lines, initial=self._num_before, unit="line", disable=None) as bar:

                def write(result: BatchResult) -> None:
                    self._sink.append(result)
                    self._num_written += 1
                    self._num_failed += result.error is not None
                    bar.update()

                try:
                    lines, has_receipts = one_by_one(self._lines_left()), self._has_receipts
                    await answer_lines(app, client, lines, write, limit, has_receipts=has_receipts)
                except EngineDeadError as error:
                    raise CommandError(str(error), "run the same command again to resume") from None

    def _lines_left(self) -> Iterator[BatchRequest | BadLine]:
        self._source.seek(0)
        return (line for line in read_lines(self._source) if line.number not in self._sink.done)


def _open_input(path: str) -> BinaryIO:
    """Open the requests. Standard input and URLs are read to the end, because the lines are read twice."""
    if is_url(path):
        return fetch(path)
    if path == STANDARD:
        return io.BytesIO(sys.stdin.buffer.read())
    try:
        return open(path, "rb")
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", "check -i") from None


def _check(source: BinaryIO, sink: Any) -> int:
    """Return the number of requests.

    Raises:
        CommandError: the results belong to other requests.
    """
    num_lines = num_done = 0
    for line in read_lines(source):
        num_lines += 1
        if line.number in sink.done:
            num_done += 1
            if sink.done[line.number] != line.custom_id:
                raise _other_batch(sink, f"line {line.number} was {sink.done[line.number]!r}, now {line.custom_id!r}")
    if num_done < len(sink.done):
        raise _other_batch(sink, "it has more results than there are requests")
    return num_lines


def _other_batch(sink: ResultsFile, reason: str) -> CommandError:
    return CommandError(
        f"{sink.path} holds the results of another batch: {reason}", "choose another -o, or --overwrite"
    )

"""`octavo run-batch`: the requests of a file in, their answers in another file out, with an engine of its own.

The routes that answer are those of the server. The same command again goes on where the last one ended.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from octavo.frontend.cli.batch.journal import Journal, StandardOutput
from octavo.frontend.cli.batch.lines import BadLine, BatchRequest, BatchResult, read_lines
from octavo.frontend.cli.batch.remote import fetch, is_url, local_name, put
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser, config_parser, configurations
from octavo.frontend.cli.start_log import start_log
from octavo.protocol.config import EngineConfig, ServerConfig
from octavo.protocol.env import set_default
from octavo.protocol.errors import EngineDeadError

STANDARD = "-"
"""Standard input or output in place of a file."""

IN_FLIGHT_PER_SLOT = 2
"""Requests given to the engine for each that it can run, so that one waits when another ends."""

_DESCRIPTION = """\
Answer the requests of a file: one JSON object per line, with custom_id, method, url and body, as OpenAI's batches
have them. Results come in the order in which they are ready; custom_id tells which is which. The same command again
goes on where the last one ended, however it ended."""


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
        help="most requests at a time; default: twice what one step can hold (--max-num-seqs)",
    )
    group.add_argument("--overwrite", action="store_true", help="forget the results that the output holds already")
    return parser


def run(words: list[str]) -> int:
    """Answer every line that has no result yet; return the exit code.

    Raises:
        CommandError: a file cannot be read or written, or a flag has no meaning here.
        StartupError: the engine cannot start; holds the root cause.
        EngineDeadError: the engine died; what has a result keeps it.
    """
    settings = parser().parse_settings(words, may_join=True)
    if settings.get("join"):
        raise CommandError("a batch has an engine of its own: leave out --join, and name a MODEL")
    paths = settings.pop("input_file"), settings.pop("output_file")
    max_in_flight = settings.pop("max_inflight", None)
    if max_in_flight is not None and max_in_flight < 1:
        raise CommandError("--max-inflight must be 1 or more")
    starts_over = settings.pop("overwrite", False)
    start_log(str(settings.get("log_level") or "WARNING"), settings.get("log_config_file"))
    engine, server = configurations(settings)
    # What goes to a URL is gathered here first, by a name that the same command finds again.
    path = Path(local_name(paths[1]) if is_url(paths[1]) else paths[1])
    with (
        _open_input(paths[0]) as source,
        nullcontext(StandardOutput()) if paths[1] == STANDARD else Journal(path, starts_over=starts_over) as sink,
    ):
        num_lines = _check(source, sink)
        batch = Batch(source, sink, num_lines)
        if batch.num_left:
            batch.run(engine, server, max_in_flight)
        print(batch.render(), file=sys.stderr)  # noqa: T201
    if is_url(paths[1]):
        put(path, paths[1])
        path.unlink()
    return 0


class Batch:
    """Requests, their results so far, and the run that makes the rest.

    Args:
        source: the requests, at its beginning.
        sink: where results go.
        num_lines: how many requests there are.
    """

    def __init__(self, source: BinaryIO, sink: Journal | StandardOutput, num_lines: int) -> None:
        self._source = source
        self._sink = sink
        self._num_lines = num_lines
        self._num_before = len(sink.done)
        self._num_written = 0
        self._num_failed = sink.num_failed

    @property
    def num_left(self) -> int:
        """Lines without a result."""
        return self._num_lines - self._num_before - self._num_written

    def render(self) -> str:
        """Return what became of the batch, in one line."""
        before = f" ({self._num_before} of them in earlier runs)" if self._num_before else ""
        return f"{self._num_lines} lines done{before}, {self._num_failed} with an error"

    def run(self, engine: EngineConfig, server: ServerConfig, max_in_flight: int | None) -> None:
        """Answer the rest.

        Raises:
            StartupError: the engine cannot start.
            EngineDeadError: the engine died.
        """
        # Only now: `--help` and completion need none of it.
        import asyncio

        import uvloop

        set_default("TOKENIZERS_PARALLELISM", "false")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(engine, server, max_in_flight))

    async def _run(self, config: EngineConfig, server: ServerConfig, max_in_flight: int | None) -> None:
        # Only now: these imports take a while.
        from tqdm import tqdm

        from octavo.frontend.cli.batch.runner import answer_lines
        from octavo.frontend.client import AsyncClient
        from octavo.frontend.http.app import App
        from octavo.frontend.http.conversation import ChatSettings
        from octavo.frontend.http.run import make_serving

        ChatSettings.of(server)  # what is wrong with its flags is told now, not when the engine is there
        async with AsyncClient.launch(config=config) as client:
            app = App(make_serving(client, server))
            limit = max_in_flight or IN_FLIGHT_PER_SLOT * client.facts.max_num_seqs
            with tqdm(total=self._num_lines, initial=self._num_before, unit="line", disable=None) as bar:

                def write(result: BatchResult) -> None:
                    self._sink.append(result)
                    self._num_written += 1
                    self._num_failed += result.error is not None
                    bar.update()

                try:
                    await answer_lines(app, client, self._lines_left(), write, limit)
                except EngineDeadError as error:
                    raise CommandError(str(error), "the same command again goes on from here") from None

    def _lines_left(self) -> Iterator[BatchRequest | BadLine]:
        self._source.seek(0)
        return (line for line in read_lines(self._source) if line.number not in self._sink.done)


def _open_input(path: str) -> BinaryIO:
    """Open the requests; standard input and URLs are read to their ends, as they have to be gone through twice."""
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


def _other_batch(sink: Journal, reason: str) -> CommandError:
    return CommandError(
        f"{sink.path} holds the results of another batch: {reason}", "choose another -o, or --overwrite"
    )

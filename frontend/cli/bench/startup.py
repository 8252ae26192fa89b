"""`octavo bench startup`: measures the time of `octavo serve` until the first token, with an empty and a warm cache."""

import contextlib
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.frontend.cli.api import Api
from octavo.frontend.cli.bench.figures import percentile
from octavo.frontend.cli.bench.offline import bench_options
from octavo.frontend.cli.bench.report import context, print_line, print_table, write_json
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser, config_parser
from octavo.protocol.env import child_environment

POLL_S = 0.005
STOP_TIMEOUT_S = 30.0

_DESCRIPTION = """\
Start `octavo serve` repeatedly, each time until it has answered a request. Cold: with an empty OCTAVO_CACHE, so that
kernels are compiled, files converted and weights packed. Warm: with the existing cache."""


@dataclass(frozen=True)
class Start:
    """Times of one start, in seconds after the command was started."""

    ready_s: float
    """When `/v1/models` responded."""
    first_token_s: float
    """When a completion of one token was received."""


def parser() -> FlagParser:
    """Return the flags of `octavo bench startup`."""
    parser = config_parser("octavo bench startup", _DESCRIPTION, has_server=False)
    group = parser.add_named_group("bench", "The measurement")
    group.add_argument("--num-iters-cold", type=int, default=3, metavar="N", help="cold starts; default: 3")
    group.add_argument(
        "--num-iters-warmup", type=int, default=1, metavar="N", help="unmeasured starts before warm ones"
    )
    group.add_argument("--num-iters-warm", type=int, default=3, metavar="N", help="warm starts; default: 3")
    group.add_argument("--output-json", metavar="FILE", help="write the result to this file")
    return parser


def run(argv: list[str]) -> int:
    """Run the benchmark and print the report; return the exit code.

    Raises:
        CommandError: a server did not start; the message has the last line of its log.
    """
    settings, options = bench_options(parser(), argv)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="octavo-startup-") as name:
        directory = Path(name)
        # YAML reads JSON.
        (directory / "settings.yaml").write_text(json.dumps(settings))
        cold = [_cold_start(directory) for _ in range(options.num_iters_cold)]
        for _ in range(options.num_iters_warmup if options.num_iters_warm else 0):
            _start(directory, {})
        warm = [_start(directory, {}) for _ in range(options.num_iters_warm)]
    for kind, starts in (("cold", cold), ("warm", warm)):
        if starts:
            figures[kind] = _figures(starts)
            print_table(f"{kind.capitalize()} start", _rows(figures[kind]))
    if not figures:
        print_line("no iterations requested")
    if options.output_json:
        write_json(options.output_json, {**context(), "model_id": settings["model"], **figures})
    return 0


def _cold_start(directory: Path) -> Start:
    cache = directory / "cache"
    try:
        return _start(directory, {"OCTAVO_CACHE": str(cache)})
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _start(directory: Path, environment: dict[str, str]) -> Start:
    """Start a server, request one token, and stop the server."""
    path = directory / "socket"
    path.unlink(missing_ok=True)
    command = ["serve", "--config", str(directory / "settings.yaml"), "--uds", str(path)]
    with (directory / "log").open("w+") as log:
        started = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "octavo", *command], stderr=log, env=child_environment(environment)
        )
        try:
            return _measure(process, path, started)
        except CommandError as error:
            # A server that cannot start closes its connections before it logs the reason.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            if process.poll() is None:
                raise
            lines = (directory / "log").read_text().splitlines()
            raise CommandError(f"the server did not start: {lines[-1] if lines else error.message}") from None
        finally:
            _end(process)


def _measure(process: "subprocess.Popen[bytes]", path: Path, started: float) -> Start:
    """Wait until the server is ready and has generated a token.

    Raises:
        CommandError: the server exited, or responded with an error.
    """
    while not listens(path):
        if process.poll() is not None:
            raise CommandError(f"the server exited with code {process.returncode}")
        time.sleep(POLL_S)
    api = Api(f"unix:{path}")
    # The server listens long before it accepts: connections wait in its backlog.
    model = api.model(None)
    ready_s = time.monotonic() - started
    api.post("/v1/completions", {"model": model, "prompt": "a", "max_tokens": 1})
    return Start(ready_s, time.monotonic() - started)


def listens(path: Path) -> bool:
    """Return whether a server listens. The file exists a moment earlier: `bind` creates it, `listen` comes later."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _figures(starts: list[Start]) -> dict[str, Any]:
    return {
        name: {"avg": statistics.fmean(times), "median": percentile(times, 50), "min": min(times), "times": times}
        for name, times in (
            ("ready_s", [start.ready_s for start in starts]),
            ("first_token_s", [start.first_token_s for start in starts]),
        )
    }


def _rows(figures: dict[str, Any]) -> list[tuple[str, int | float | str]]:
    rows: list[tuple[str, int | float | str]] = [("Starts", len(figures["ready_s"]["times"]))]
    for name, label in (("ready_s", "until the server answers (s)"), ("first_token_s", "until the first token (s)")):
        rows += [(f"{kind.capitalize()} {label}", figures[name][kind]) for kind in ("avg", "median", "min")]
    return rows

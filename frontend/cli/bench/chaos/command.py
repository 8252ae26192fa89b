"""`octavo bench chaos`: kills and stops processes of an engine under load, and compares every answer bit for bit."""

import argparse
import shlex
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from octavo.frontend.cli.bench.offline import bench_options
from octavo.frontend.cli.bench.report import say
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser, config_parser

_DESCRIPTION = """\
Try whether an engine loses, doubles or changes an answer. Random requests are first answered one at a time by an
undisturbed engine. Then many clients ask them all at once, of HTTP processes and from applications that have joined
the engine, with a cache so small that requests are preempted, while workers, cores, HTTP processes and applications
are killed and stopped. Every answer must have the bits of the first, and nothing may be left when the engine ends.
Requests, manners and strikes follow from --seed."""

SETTINGS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 96,
    "max_num_batched_tokens": 256,
    "scheduling_policy": "priority",
    "execute_model_timeout": 3,
    "core_timeout": 4,
    "disable_log_stats": True,
}
"""Of the engine, where the command line is silent: small, and soon out of patience."""

_NUMBERS = {
    "--requests": (1000, "requests of the run"),
    "--kills": (30, "processes killed, or stopped for longer than the engine waits, spread over all kinds"),
    "--clients": (200, "requests under way at once"),
    "--client-processes": (3, "processes that ask over HTTP, and as many that have joined the engine"),
    "--server-processes": (3, "HTTP processes of the server"),
    "--timeout": (600, "seconds after which a request counts as lost"),
}


def parser() -> FlagParser:
    """Return the flags of `octavo bench chaos`."""
    parser = config_parser("octavo bench chaos", _DESCRIPTION, has_server=False)
    group = parser.add_named_group("chaos", "The run")
    for flag, (default, text) in _NUMBERS.items():
        group.add_argument(flag, type=_count, default=default, metavar="N", help=f"{text}; default: {default}")
    group.add_argument(
        "--distinct", type=_count, metavar="N", help="different requests among them; default: a quarter of --requests"
    )
    group.add_argument("--output-json", metavar="FILE", help="write the report here")
    group.add_argument(
        "--log-dir", metavar="DIR", help="where the logs of servers and clients go; default: kept only on failure"
    )
    group.add_argument("--disable-tqdm", action="store_true", default=False, help="no progress bar")
    return parser


def run(words: list[str]) -> int:
    """Try, and tell; return the exit code.

    Raises:
        CommandError: an answer was lost, doubled or changed, or something was left behind; or a server did not start.
    """
    settings, options = bench_options(parser(), words)
    _check(options)
    replay = shlex.join(["octavo", "bench", "chaos", *words])
    if "seed" not in settings:
        replay += " --seed 0"
    from octavo.frontend.cli.bench.chaos.trial import try_engine

    # Like Ctrl-C: what was started is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = Path(options.log_dir or tempfile.mkdtemp(prefix="octavo-chaos-log-"))
    logs.mkdir(parents=True, exist_ok=True)
    is_good = False
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-chaos-") as name:
            trial = try_engine({**SETTINGS, **settings}, options, Path(name), logs, settings.get("seed", 0))
        trial.tell(replay)
        if options.output_json:
            trial.write(options.output_json, replay)
        is_good = not trial.faults
    finally:
        if not is_good:
            say(f"logs: {logs}")
        elif not options.log_dir:
            shutil.rmtree(logs)
    if trial.faults:
        raise CommandError(
            f"{len(trial.faults)} things must not be, one of them: {trial.faults[0]}", f"again: {replay}"
        )
    return 0


def _check(options: argparse.Namespace) -> None:
    if min(options.requests, options.clients, options.client_processes, options.server_processes) < 1:
        raise CommandError("a run needs a request, a client and a process of each kind at least")


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number

"""`octavo bench chaos`: kills and stops processes of an engine under load, and compares every answer bit for bit."""

import argparse
import shlex
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.frontend.cli.bench.offline import bench_options
from octavo.frontend.cli.bench.report import print_line
from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.flags import FlagParser, config_parser

if TYPE_CHECKING:
    from octavo.protocol.config import ModelFacts

_DESCRIPTION = """\
Test whether an engine loses, duplicates or changes answers when its processes die. An undisturbed engine first answers
random requests one at a time. Then many clients send the same requests concurrently, over HTTP and from applications
that have joined the engine, while workers, cores, HTTP processes and applications are killed and stopped. The KV cache
is small enough to force preemption. Every answer must match the undisturbed one bit for bit, and no process or file
may be left when the engine stops. A model that pools gets texts for all of its tasks instead. --seed determines the
requests, the clients' behavior and the injected faults."""

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
"""Engine settings that the command line may override: a small engine with short timeouts."""

_NUMBERS = {
    "--requests": (1000, "number of requests"),
    "--kills": (
        30,
        "processes of all kinds to kill, or to stop for longer than the engine's timeouts",
    ),
    "--clients": (200, "concurrent requests"),
    "--client-processes": (3, "number of HTTP client processes, and of applications that join the engine"),
    "--server-processes": (3, "API server processes"),
    "--timeout": (600, "a request without an answer after so many seconds is lost"),
}


def parser() -> FlagParser:
    """Return the flags of `octavo bench chaos`."""
    parser = config_parser("octavo bench chaos", _DESCRIPTION, has_server=False)
    group = parser.add_named_group("chaos", "The run")
    for flag, (default, text) in _NUMBERS.items():
        group.add_argument(flag, type=_count, default=default, metavar="N", help=f"{text}; default: {default}")
    group.add_argument(
        "--distinct", type=_count, metavar="N", help="number of different requests; default: a quarter of --requests"
    )
    group.add_argument("--output-json", metavar="FILE", help="write the report to this file")
    group.add_argument(
        "--log-dir",
        metavar="DIR",
        help="directory for the logs of servers and clients; default: kept only on failure",
    )
    group.add_argument("--disable-tqdm", action="store_true", default=False, help="no progress bar")
    return parser


def run(argv: list[str]) -> int:
    """Run the test and print the report; return the exit code.

    Raises:
        CommandError: an answer was lost, duplicated or changed, a process or file was left behind, or a server did not
        start.
    """
    settings, options = bench_options(parser(), argv)
    _check(options)
    replay = shlex.join(["octavo", "bench", "chaos", *argv])
    if "seed" not in settings:
        replay += " --seed 0"
    from octavo.frontend.cli.bench.chaos.run import run_chaos
    from octavo.frontend.model_files.facts import read_model_facts
    from octavo.protocol.config.sources import engine_config
    from octavo.protocol.env import Env

    facts = read_model_facts(engine_config(settings).model, Env.read())
    settings = {**_defaults(facts), **settings}
    tasks = facts.pooling.tasks if facts.pooling else ()
    # Same effect as Ctrl-C: the finally blocks stop every process that we started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = Path(options.log_dir or tempfile.mkdtemp(prefix="octavo-chaos-log-"))
    logs.mkdir(parents=True, exist_ok=True)
    is_good = False
    try:
        with tempfile.TemporaryDirectory(prefix="octavo-chaos-") as name:
            report = run_chaos(settings, options, Path(name), logs, settings.get("seed", 0), tasks)
        report.show(replay)
        if options.output_json:
            report.write(options.output_json, replay)
        is_good = not report.faults
    finally:
        if not is_good:
            print_line(f"logs: {logs}")
        elif not options.log_dir:
            shutil.rmtree(logs)
    if report.faults:
        raise CommandError(f"{len(report.faults)} checks failed, the first: {report.faults[0]}", f"to repeat: {replay}")
    return 0


def _defaults(facts: "ModelFacts") -> dict[str, Any]:
    """Return `SETTINGS`, adapted if a pooling model could not start with them."""
    if facts.pooling is None:
        return SETTINGS
    max_model_len = min(SETTINGS["max_model_len"], facts.max_position_embeddings)
    defaults = {**SETTINGS, "max_model_len": max_model_len}
    if not facts.pooling.is_causal:  # such a model computes whole prompts in one step
        defaults["max_num_batched_tokens"] = max_model_len
    return defaults


def _check(options: argparse.Namespace) -> None:
    if min(options.requests, options.clients, options.client_processes, options.server_processes) < 1:
        raise CommandError("--requests, --clients, --client-processes and --server-processes must be at least 1")


def _count(text: str) -> int:
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return number

"""The server that a benchmark measures: a running one, or an `octavo serve` that it starts. Measures nothing."""

import argparse
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import fetch_default_model
import httpx

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


def parse_arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of the benchmark and, from after --, the flags of the server that it starts.

    Adds --url and --model to the parser.
    """
    parser.epilog = "Flags after -- are passed to `octavo serve`."
    parser.add_argument("--url", help="URL of a running server; by default one is started and stopped")
    parser.add_argument("--model", help="model to serve, or name of the served model; default: SmolLM2-135M-Instruct")
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    serve_flags = argv[split + 1 :]
    if args.url and serve_flags:
        parser.error("flags for `octavo serve` have no effect on a running server: drop --url or the flags")
    return args, serve_flags


@contextlib.contextmanager
def server_of(args: argparse.Namespace, serve_flags: Sequence[str]) -> Iterator[str]:
    """Yield the URL of the server that the arguments name; a server that was started here is stopped on exit."""
    if args.url:
        yield args.url.rstrip("/")
        return
    with serving(args.model or str(fetch_default_model.fetch()), serve_flags) as (url, _):
        yield url


@contextlib.contextmanager
def serving(model: str, flags: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Start a server on a free port, yield its URL and process id once it is ready, and stop it on exit.

    Raises:
        SystemExit: the server exited while it started, or was not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    octavo = Path(sys.executable).parent / "octavo"
    process = subprocess.Popen([octavo, "serve", model, "--port", str(port), *flags])
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_until_healthy(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode} while it started")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready after {START_TIMEOUT_S:.0f} s")

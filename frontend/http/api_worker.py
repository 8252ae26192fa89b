"""A further HTTP process (`--api-server-count`): serves the engine that its parent has started.

Run as `python -P -m octavo.frontend.http.api_worker`; `api_workers.py` spawns and stops it. It imports the server only
after its signal handlers and its watch for the parent's death are installed.
"""

from octavo.protocol.control import ServerSpec
from octavo.protocol.lifecycle import EXIT_FAILED, EXIT_OK, StartupReporter, StopSignal, run_child
from octavo.protocol.log import configure_logging


def main(spec: ServerSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    """Serve until asked to stop; return the exit code."""
    configure_logging(f"Frontend {spec.row}", spec.log_level, spec.log_config)
    from octavo.frontend.http.run_api_worker import run_api_worker

    return EXIT_OK if run_api_worker(spec, reporter, stop) else EXIT_FAILED


if __name__ == "__main__":
    run_child("Frontend", ServerSpec, main)

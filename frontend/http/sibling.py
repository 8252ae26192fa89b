"""A further HTTP process (`--api-server-count`): serves the engine that its parent has started.

`python -P -m octavo.frontend.http.sibling`, spawned and ended by `siblings.py`. It imports the server only when its
signal handlers and its watch for the parent's death stand.
"""

from octavo.protocol.control import ServerSpec
from octavo.protocol.lifecycle import EXIT_FAILED, EXIT_OK, Reporter, StopSignal, run_child
from octavo.protocol.log import configure_logging


def main(spec: ServerSpec, reporter: Reporter, stop: StopSignal) -> int:
    """Serve until told to stop; returns the exit code."""
    configure_logging(f"Frontend {spec.row}", spec.log_level, spec.log_config)
    from octavo.frontend.http.run_sibling import run_sibling

    return EXIT_OK if run_sibling(spec, reporter, stop) else EXIT_FAILED


if __name__ == "__main__":
    run_child("Frontend", ServerSpec, main)

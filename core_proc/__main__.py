"""Entry point of a core process."""

import logging

from octavo.core_proc.core import EngineCore
from octavo.core_proc.workers.group import WorkerFailed
from octavo.protocol.control import CoreSpec
from octavo.protocol.lifecycle import EXIT_HOPELESS, StartupReporter, StopSignal, run_child

logger = logging.getLogger(__name__)


def main(spec: CoreSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    """Run an engine and return the exit code."""
    try:
        return EngineCore(spec, reporter, stop).run()
    except WorkerFailed:
        if not reporter.is_ready:
            raise
        logger.exception("the workers keep crashing (their errors are above); the engine exits")
        return EXIT_HOPELESS


if __name__ == "__main__":
    run_child("Core", CoreSpec, main)

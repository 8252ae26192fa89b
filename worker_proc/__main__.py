"""Entry of a worker process. Imports nothing heavy before it watches for its parent's death."""

import gc

from octavo.protocol.control import WorkerSpec
from octavo.protocol.env import set_default
from octavo.protocol.lifecycle import StartupReporter, StopSignal, run_child

SPIN_COUNT = "1000"
"""Without it, the threads of an OpenMP team spin for milliseconds while they wait for work."""


def main(spec: WorkerSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    """Load the model, report ready and execute commands. Return the exit code."""
    set_default("GOMP_SPINCOUNT", SPIN_COUNT)
    # Garbage collection takes a tenth of the import time and frees little. The worker enables it when it is ready.
    gc.disable()
    with reporter.phase("importing torch"):
        from octavo.worker_proc.worker import Worker

    return Worker.start(spec, reporter).run(stop)


if __name__ == "__main__":
    run_child("Worker", WorkerSpec, main)

"""Entry of a worker process. Imports nothing heavy before the parent watch stands."""

import gc

from octavo.protocol.control import WorkerSpec
from octavo.protocol.env import set_default
from octavo.protocol.lifecycle import Reporter, StopSignal, run_child


def main(spec: WorkerSpec, reporter: Reporter, stop: StopSignal) -> int:
    """Load the model, report ready and obey commands; returns the exit code."""
    # Threads of an OpenMP team that wait for work would spin for milliseconds by default.
    set_default("GOMP_SPINCOUNT", "1000")
    # Imports leave little garbage, and looking for it again and again takes a tenth of their time. The worker
    # begins to collect when it is ready.
    gc.disable()
    with reporter.phase("importing torch"):
        from octavo.worker_proc.worker import Worker

    return Worker.start(spec, reporter).run(stop)


if __name__ == "__main__":
    run_child("Worker", WorkerSpec, main)

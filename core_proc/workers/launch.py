"""Starts the first group of an engine's workers: the only place that knows which kinds of groups there are."""

import zmq

from octavo.core_proc.workers.group import WorkerGroup
from octavo.core_proc.workers.local import LocalWorkerGroup
from octavo.protocol.control import CoreSpec

WORKER_MODULE = "octavo.worker_proc"


def launch_workers(
    spec: CoreSpec, context: "zmq.Context[zmq.Socket[bytes]]", module: str = WORKER_MODULE
) -> WorkerGroup:
    """Return a group whose workers start.

    Args:
        spec: of the core.
        context: of this process.
        module: what each worker runs.

    Raises:
        StartupError: a socket cannot be bound.
        OSError: a process cannot be started.
    """
    return LocalWorkerGroup(
        spec.config,
        spec.run_dir,
        context,
        module=module,
        log_level=spec.log_level,
        log_config=spec.log_config,
        facts=spec.facts,
    )

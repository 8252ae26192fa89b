"""Starts the first group of an engine's workers. The only module that knows all kinds of groups."""

from typing import Any

import zmq

from octavo.core_proc.workers.agents import Agents
from octavo.core_proc.workers.fork_server import ForkServer
from octavo.core_proc.workers.group import WorkerGroup
from octavo.core_proc.workers.local import LocalWorkerGroup
from octavo.core_proc.workers.lock_step import LockStepPlace, LockStepWorkerGroup
from octavo.core_proc.workers.nodes import LaunchedNodes
from octavo.core_proc.workers.remote import RemoteWorkerGroup
from octavo.protocol.control import CoreSpec

WORKER_MODULE = "octavo.worker_proc"


def launch_workers(
    spec: CoreSpec, context: "zmq.Context[zmq.Socket[bytes]]", module: str = WORKER_MODULE
) -> WorkerGroup:
    """Return a group whose workers are starting.

    Args:
        spec: spec of the core.
        context: ZeroMQ context of this process.
        module: the module that each worker runs.

    Raises:
        StartupError: a socket cannot be bound, or there is no cluster.
        OSError: a process cannot be started.
    """
    config = spec.config
    log_level, log_config, facts = spec.log_level, spec.log_config, spec.facts
    agents: Agents
    if config.executor == "ray":
        # Imported here because Ray is an optional extra.
        from octavo.core_proc.workers.ray import RayNodes

        agents = RayNodes(config, module)
    elif config.num_nodes > 1:
        agents = LaunchedNodes(spec, module)
    else:
        settings: dict[str, Any] = {
            "module": module,
            "fork_server": _fork_server(spec) if module == WORKER_MODULE else None,
            "log_level": log_level,
            "log_config": log_config,
            "facts": facts,
        }
        if config.is_lock_step:
            place = LockStepPlace(spec.lock_step_path, spec.lock_step_fd)
            return LockStepWorkerGroup(config, spec.run_dir, context, place=place, **settings)
        return LocalWorkerGroup(config, spec.run_dir, context, **settings)
    return RemoteWorkerGroup(agents, config, log_level=log_level, log_config=log_config, facts=facts)


def _fork_server(spec: CoreSpec) -> ForkServer | None:
    """Return the server that forks the workers. Return None if workers are started directly, because starting a server
    would only delay a single worker.

    Raises:
        OSError: a server cannot be started.
    """
    if spec.fork_server_fd >= 0:
        return ForkServer(spec.fork_server_fd)
    return ForkServer() if spec.config.forks_workers and spec.config.world_size > 1 else None

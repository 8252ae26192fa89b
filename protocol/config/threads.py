"""Number of compute threads of a CPU worker, and the cores to which they are bound."""

from typing import Literal, TypeAlias

from octavo.protocol.config.engine import EngineConfig
from octavo.protocol.cores import parse_core_list
from octavo.protocol.errors import ConfigError

CoreBinding: TypeAlias = list[int] | Literal["none", "compact"]
"""The cores to which compute threads are bound, in the order of the threads."""


def resolve_threads(config: EngineConfig, num_cores: int, num_workers: int) -> tuple[CoreBinding, int]:
    """Return the cores of all workers, and the number of threads per worker.

    Args:
        config: the user's settings.
        num_cores: number of cores on which this process may run.
        num_workers: number of workers of all engines on this machine.

    Raises:
        ConfigError: the list of cores is malformed or too short.
    """
    requested, text = config.device.num_threads, config.device.cpu_binding
    if text == "none":
        return "none", requested or max(1, num_cores // num_workers)
    if text == "compact":
        return "compact", requested or max(1, num_cores // num_workers)
    try:
        cores = parse_core_list(text)
    except ValueError as error:
        hint = "use --cpu-binding none, compact, or a list such as 0-3,8"
        raise ConfigError(f"cpu_binding: {error}", hint=hint) from None
    num_threads = requested or max(1, len(cores) // num_workers)
    if num_threads * num_workers > len(cores):
        workers = f"num_threads {num_threads}" + (f" of each of {num_workers} workers" if num_workers > 1 else "")
        raise ConfigError(
            f"cpu_binding {text!r} has {len(cores)} cores for {workers}",
            hint=f"use --num-threads {len(cores) // num_workers} or a longer list"
            if len(cores) >= num_workers
            else f"use a list of at least {num_workers} cores",
        )
    return cores, num_threads

"""Checks of the requested number of machines (nodes)."""

from octavo.protocol.config.parallel import ParallelConfig
from octavo.protocol.errors import ConfigError


def check_nodes(parallel: ParallelConfig, world_size: int) -> None:
    """Reject numbers of nodes that do not fit the number of workers.

    Raises:
        ConfigError: they do not fit.
    """
    problem = hint = ""
    if parallel.distributed_executor_backend == "uni" and world_size > 1:
        problem, hint = f"distributed_executor_backend uni runs one worker, not {world_size}", "use mp or ray"
    elif parallel.nnodes > 1 and parallel.distributed_executor_backend == "ray":
        problem, hint = f"nnodes {parallel.nnodes}: Ray knows its nodes itself", "leave out --nnodes"
    elif parallel.nnodes > 1 and parallel.data_parallel_size > 1:
        problem = f"nnodes {parallel.nnodes} with data_parallel_size {parallel.data_parallel_size}"
        hint = "start one engine for each group of nodes, and join them with octavo serve --join"
    elif world_size % parallel.nnodes:
        problem = f"nnodes {parallel.nnodes} does not divide the number of workers ({world_size})"
        hint = f"use --tensor-parallel-size {parallel.nnodes}, or a multiple of it"
    elif parallel.node_rank >= parallel.nnodes:
        problem = f"node_rank {parallel.node_rank} of nnodes {parallel.nnodes}"
        hint = f"nodes have the numbers 0 to {parallel.nnodes - 1}"
    if problem:
        raise ConfigError(problem, hint=hint)

"""Checks for engines that share the experts of a model."""

from octavo.protocol.config.engine import DeviceName, KernelChoice
from octavo.protocol.config.parallel import ParallelConfig
from octavo.protocol.errors import ConfigError


def check_lock_step(parallel: ParallelConfig, device: DeviceName, kernels: KernelChoice) -> None:
    """Reject settings that cannot be combined with sharing the experts.

    Raises:
        ConfigError: the configuration has such a setting.
    """
    if not parallel.enable_expert_parallel or parallel.data_parallel_size == 1:
        return
    obstacles = {
        f"pipeline_parallel_size {parallel.pipeline_parallel_size}": parallel.pipeline_parallel_size > 1,
        "data_parallel_backend ray": parallel.data_parallel_backend == "ray",
        "distributed_executor_backend ray": parallel.distributed_executor_backend == "ray",
        f"nnodes {parallel.nnodes}": parallel.nnodes > 1,
        f"device {device}": device != "cpu",
        "cpu_kernels torch": kernels == "torch",
    }
    if found := next((name for name, is_there in obstacles.items() if is_there), None):
        raise ConfigError(
            f"enable_expert_parallel with data_parallel_size {parallel.data_parallel_size} divides the experts between "
            f"engines of one machine that compute with the native kernels, without pipeline stages: {found}",
            hint="leave out --enable-expert-parallel, so that every engine has all experts, or --data-parallel-size",
        )

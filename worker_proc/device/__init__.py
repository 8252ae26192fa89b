"""The device of a worker: its memory and its stream, behind one small interface."""

from octavo.protocol.config import ResolvedConfig
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.cpu import CpuDevice
from octavo.worker_proc.device.cuda import CudaDevice


def open_device(config: ResolvedConfig, *, number: int = 0, launches_early: bool = False) -> Device:
    """Return the device that the configuration names, ready for use.

    Args:
        config: engine configuration.
        number: index of this worker among all on the machine.
        launches_early: see `CudaDevice`; a CPU has no such launches.

    Raises:
        StartupError: the device does not exist, or this torch cannot compute on it.
    """
    if config.device == "cuda":
        has_fp8_cache = config.kv_cache_dtype == "fp8"
        return CudaDevice(
            number,
            is_deterministic=config.is_batch_invariant,
            has_fp8_cache=has_fp8_cache,
            launches_early=launches_early,
        )
    return CpuDevice(config.num_threads, num_sharing=config.ranks_per_node * config.data_parallel_size)

"""What a worker must know of the device it computes on, behind one small interface."""

from octavo.protocol.config import ResolvedConfig
from octavo.protocol.errors import StartupError
from octavo.worker_proc.device.base import Device
from octavo.worker_proc.device.cpu import CpuDevice


def open_device(config: ResolvedConfig) -> Device:
    """Return the device that the configuration names, ready for use.

    Raises:
        StartupError: this release cannot compute on it.
    """
    if config.device == "cpu":
        return CpuDevice(config.num_threads)
    raise StartupError(
        f"this release cannot compute on {config.device}: its kernels are for the CPU",
        phase="opening the device",
        hint="use --device cpu",
    )

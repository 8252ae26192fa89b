"""The CPU as a device: memory that kernel and container leave free, and the number of compute threads."""

import contextlib
import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.worker_proc.device.base import Device

_RESET_PEAK = "5"
"""Value that resets VmHWM when written to `clear_refs`; see proc_pid_clear_refs(5)."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_MIN_RETURNED_BYTES = 256 * 2**10
_MAX_KEPT_BYTES = 32 * 2**20
"""The largest threshold that glibc would choose; the trim threshold is twice as large."""


class CpuDevice(Device):
    """The processor and main memory, within the limits of this process's control group.

    Args:
        num_threads: compute threads of torch in this process.
        num_sharing: number of workers that share the memory equally.
        root: root of `/proc` and `/sys`; tests pass another folder.
    """

    def __init__(self, num_threads: int, root: Path = Path("/"), *, num_sharing: int = 1) -> None:
        torch.set_num_threads(num_threads)
        self.torch_device = torch.device("cpu")
        self._root = root
        self._num_sharing = num_sharing
        self.name = f"{self._processor()}, {num_threads} threads"
        total, _ = self._system_memory()
        self.total_bytes = min([total, *(limit for limit, _ in self._cgroups())]) // num_sharing
        self._base_bytes = 0

    def free_bytes(self) -> int:
        """Return this worker's part of the memory that the kernel reports as available, limited by the container."""
        _, available = self._system_memory()
        return max(0, min([available, *(limit - used for limit, used in self._cgroups())])) // self._num_sharing

    def stream(self) -> None:
        """Return `None`: the host computes."""

    def reset_peak(self) -> None:
        """Start to measure a new peak; if the kernel does not allow it, the old peak is the base."""
        give_back_freed_memory()
        with contextlib.suppress(OSError):
            (self._root / "proc/self/clear_refs").write_text(_RESET_PEAK)
        self._base_bytes = self._peak_bytes()

    def peak_growth_bytes(self) -> int:
        """Return how far the resident memory rose above its size at `reset_peak`."""
        return self._peak_bytes() - self._base_bytes

    def _peak_bytes(self) -> int:
        """Return the largest resident memory since the peak was reset."""
        for line in self._lines("proc/self/status"):
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        # Some sandboxes lack VmHWM. `ru_maxrss` cannot be reset, and starts with the parent's value.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _processor(self) -> str:
        for line in (self._root / "proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
        return "CPU"

    def _system_memory(self) -> tuple[int, int]:
        """Return the bytes of main memory, and how many of them are available."""
        kib = {}
        for line in (self._root / "proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            kib[key] = int(value.split()[0])
        return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024

    def _cgroups(self) -> list[tuple[int, int]]:
        """Return (limit, use without reclaimable file pages) of every control group that limits this process."""
        base = self._root / "sys/fs/cgroup"
        found = []
        for line in self._lines("proc/self/cgroup"):
            _, controllers, path = line.split(":", 2)
            if not controllers:
                folder, names = base, ("memory.max", "memory.current", "inactive_file")
            elif "memory" in controllers.split(","):
                folder = base / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            own = folder / path.lstrip("/")
            # In a container the path may be that of the host. Then the root folder is the group of the process.
            groups = {group for group in (folder, own, *own.parents) if group.is_relative_to(folder)}
            found += [memory for group in groups if (memory := _group_memory(group, *names))]
        return found

    def _lines(self, path: str) -> list[str]:
        file = self._root / path
        return file.read_text().splitlines() if file.exists() else []


def give_back_freed_memory() -> None:
    """Return the C library's free lists to the system, so that memory allocated from them counts as growth."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # glibc only
        library.malloc_trim(0)


@contextlib.contextmanager
def freed_memory_returns() -> Iterator[None]:
    """Let the C library return large buffers to the system as soon as they are freed.

    By default it keeps them once it has seen that they are freed often. While weights are read, these would be the
    memory of hundreds of tensors, in pieces between packed weights. Afterwards it keeps buffers of up to 32 MB, as
    it would have learned to: steps of torch allocate the same ones again and again.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # glibc only
        yield
        return
    library.mallopt(_M_MMAP_THRESHOLD, _MIN_RETURNED_BYTES)
    try:
        yield
    finally:
        library.malloc_trim(0)
        library.mallopt(_M_MMAP_THRESHOLD, _MAX_KEPT_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _MAX_KEPT_BYTES)


def _group_memory(group: Path, limit_name: str, use_name: str, file_pages: str) -> tuple[int, int] | None:
    """Return the group's limit and usage in bytes; None if it has no limit."""
    try:
        limit = (group / limit_name).read_text().strip()
        used = int((group / use_name).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the controller does not exist or is not readable
        return None
    # Version 1 writes "no limit" as the largest multiple of the page size.
    if limit == "max" or int(limit) >= 2**62:
        return None
    return int(limit), used - int(stat.get(file_pages, "0"))

"""The CPU as a device: whose memory limit counts."""

from pathlib import Path

import pytest
import torch
from specs import some_config

from octavo.protocol.errors import StartupError
from octavo.worker_proc.device import open_device
from octavo.worker_proc.device.cpu import CpuDevice

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def machine(root: Path, cgroup: str, files: dict[str, str]) -> CpuDevice:
    """A machine of 16 GiB, 10 of them available."""
    system = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Abacus 3000\n",
        "proc/meminfo": f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {10 * 2**20} kB\n",
        "proc/self/cgroup": cgroup,
    }
    return CpuDevice(torch.get_num_threads(), write(root, system | files))


def group(path: str, *, limit: str, used: int, file_pages: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup/{path}memory.max": limit,
        f"sys/fs/cgroup/{path}memory.current": str(used),
        f"sys/fs/cgroup/{path}memory.stat": f"anon 5\ninactive_file {file_pages}\n",
    }


def test_without_a_control_group_the_system_counts(tmp_path: Path) -> None:
    device = machine(tmp_path, "0::/\n", {})
    assert (device.total_bytes, device.free_bytes()) == (16 * GIB, 10 * GIB)
    assert device.name.startswith("Abacus 3000, ")


def test_the_tightest_group_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    files = group("a/", limit=str(4 * GIB), used=GIB) | group("a/b/", limit="max", used=GIB)
    device = machine(tmp_path, "0::/a/b\n", files)
    assert (device.total_bytes, device.free_bytes()) == (4 * GIB, 3 * GIB)


def test_file_pages_that_can_be_dropped_are_free(tmp_path: Path) -> None:
    device = machine(tmp_path, "0::/\n", group("", limit=str(4 * GIB), used=3 * GIB, file_pages=2 * GIB))
    assert device.free_bytes() == 3 * GIB


def test_a_path_of_the_host_falls_back_to_the_mounted_group(tmp_path: Path) -> None:
    device = machine(tmp_path, "0::/host/only\n", group("", limit=str(2 * GIB), used=GIB))
    assert device.free_bytes() == GIB


def test_version_1_groups(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(3 * GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB // 2}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/memory/memory.stat": "",
    }
    device = machine(tmp_path, "5:cpu:/job\n4:memory:/job\n", files)
    assert (device.total_bytes, device.free_bytes()) == (3 * GIB, 2 * GIB + GIB // 2)


def test_a_full_group_leaves_nothing_and_not_less(tmp_path: Path) -> None:
    device = machine(tmp_path, "0::/\n", group("", limit=str(GIB), used=2 * GIB))
    assert device.free_bytes() == 0


def test_growth_is_seen_after_it_is_gone() -> None:
    device = CpuDevice(torch.get_num_threads())
    device.reset_peak()
    torch.ones(16 * 2**20)
    assert 60 * 2**20 < device.peak_growth_bytes() < 90 * 2**20


def test_other_devices_are_refused() -> None:
    with pytest.raises(StartupError, match="cannot compute on cuda") as error:
        open_device(some_config(device="cuda"))
    assert "--device cpu" in error.value.hint

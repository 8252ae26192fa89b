"""Devices: which memory limit applies on a CPU, and the error if there is no GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from specs import some_config

from octavo.frontend import device
from octavo.kernels import programmatic_launch
from octavo.protocol.errors import NotEnoughMemoryError, StartupError
from octavo.worker_proc.device import cuda, open_device
from octavo.worker_proc.device.cpu import CpuDevice
from octavo.worker_proc.device.cuda import CudaDevice
from octavo.worker_proc.worker import Worker

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


def test_a_full_control_group_leaves_zero_bytes(tmp_path: Path) -> None:
    device = machine(tmp_path, "0::/\n", group("", limit=str(GIB), used=2 * GIB))
    assert device.free_bytes() == 0


def test_growth_is_seen_after_it_is_gone() -> None:
    device = CpuDevice(torch.get_num_threads())
    device.reset_peak()
    torch.ones(16 * 2**20)
    assert 60 * 2**20 < device.peak_growth_bytes() < 90 * 2**20


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch is built for CUDA")
def test_a_torch_without_cuda_says_so() -> None:
    with pytest.raises(StartupError, match="is not built for CUDA") as error:
        open_device(some_config(device="cuda"))
    assert error.value.phase == "opening the device"
    assert "--device cpu" in error.value.hint


def test_a_gpu_that_is_not_there_is_a_startup_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(StartupError, match="there is no GPU 1: torch sees 1"):
        CudaDevice(1, is_deterministic=False)


@pytest.mark.parametrize(
    ("gpu", "capability", "settings", "message"),
    [
        ("Tesla T4", (7, 5), {}, r"Tesla T4 has compute capability 7\.5"),
        ("A100", (8, 0), {"has_fp8_cache": True}, "A100 has no float8_e4m3fn"),
        ("A100", (8, 0), {"launches_early": True}, "A100 cannot launch kernels before the kernel ahead of them ends"),
    ],
)
def test_a_gpu_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, gpu: str, capability: tuple[int, int], settings: dict[str, bool], message: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name, answer in {
        "device_count": lambda: 1,
        "get_device_capability": lambda index: capability,
        "get_device_name": lambda index: gpu,
        "set_device": lambda index: None,
        "init": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with pytest.raises(StartupError, match=message):
        CudaDevice(0, is_deterministic=False, **settings)
    assert programmatic_launch.launch_options() == {"IS_DEPENDENT": False}


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_a_deterministic_device_takes_the_workspaces_of_products_away(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables: dict[str, str] = {}
    libraries: list[str] = []
    monkeypatch.setattr(cuda, "set_default", set_variables.__setitem__)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", libraries.append)
    cuda.prepare_products(is_deterministic=is_deterministic)
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    assert set_variables == (variables if is_deterministic else {})
    assert libraries == (["cublaslt"] if is_deterministic else [])


def machine_with(root: Path, *, gpus: int) -> Path:
    (root / "dev").mkdir()
    for name in ("nvidiactl", *(f"nvidia{index}" for index in range(gpus))):
        (root / "dev" / name).touch()
    return root


def test_auto_is_a_gpu_that_is_there_and_that_torch_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_one = machine_with(tmp_path, gpus=1)
    monkeypatch.setattr(device, "torch_has_cuda", lambda: True)
    assert device.detect_device(hides_gpus=False, root=with_one) == "cuda"
    assert device.detect_device(hides_gpus=True, root=with_one) == "cpu"
    monkeypatch.setattr(device, "torch_has_cuda", lambda: False)
    assert device.detect_device(hides_gpus=False, root=with_one) == "cpu"


def test_auto_without_a_gpu_is_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "torch_has_cuda", lambda: True)
    assert device.detect_device(hides_gpus=False, root=machine_with(tmp_path, gpus=0)) == "cpu"


def test_whether_torch_has_cuda_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.torch_has_cuda() == torch.backends.cuda.is_built()
    found = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: found)
    (tmp_path / "version.py").write_text("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert device.torch_has_cuda()


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), NotEnoughMemoryError),
        (RuntimeError("CUDA error: out of memory"), NotEnoughMemoryError),
        (MemoryError("no pages"), NotEnoughMemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ],
)
def test_only_a_warm_up_without_memory_is_told_to_use_less(error: Exception, shown: type[Exception]) -> None:
    def fail() -> int:
        raise error

    worker = Worker.__new__(Worker)
    worker._allocation = None
    worker._executor, worker._device = SimpleNamespace(warm_up=fail), SimpleNamespace(free_bytes=lambda: 0)
    with pytest.raises(shown, match=str(error)) as caught:
        worker._warm_up(1)
    assert type(caught.value) is shown

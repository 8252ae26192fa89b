"""The cores that a process may use, from fake `/sys` and `/proc` folders."""

import os
from pathlib import Path

import pytest

from octavo.protocol.cores import num_usable_cores, parse_core_list, usable_cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that writes a machine with two threads per core; nodes take turns with the cores."""

    def write(num_cores: int, num_nodes: int = 1, allowed: set[int] | None = None) -> Path:
        devices = tmp_path / "sys/devices/system"
        for number in range(2 * num_cores):
            folder = devices / f"cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            core = number % num_cores
            (folder / "thread_siblings_list").write_text(f"{core},{core + num_cores}\n")
        for node in range(num_nodes):
            (devices / f"node/node{node}").mkdir(parents=True)
            members = [str(number) for number in range(2 * num_cores) if number % num_cores % num_nodes == node]
            (devices / f"node/node{node}/cpulist").write_text(",".join(members) + "\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed or set(range(2 * num_cores)))
        return tmp_path

    return write


def quota(root: Path, files: dict[str, str], group: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_one_hardware_thread_of_each_core(machine) -> None:
    assert usable_cores(machine(4)) == [0, 1, 2, 3]


def test_cores_of_a_node_stand_together(machine) -> None:
    assert usable_cores(machine(4, num_nodes=2)) == [0, 2, 1, 3]


def test_only_what_the_process_may_use(machine) -> None:
    assert usable_cores(machine(4, allowed={1, 5, 6})) == [1, 6]


def test_without_a_topology_every_processor_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert usable_cores(tmp_path) == [0, 1, 2]
    assert num_usable_cores(tmp_path) == 3


def test_quota_of_a_container(machine) -> None:
    root = machine(8)
    quota(root, {"a/cpu.max": "max 100000\n", "cpu.max": "250000 100000\n"}, "0::/a/b\n")
    assert num_usable_cores(root) == 3


def test_quota_of_version_1(machine) -> None:
    root = machine(8)
    files = {"cpu/a/cpu.cfs_quota_us": "50000\n", "cpu/a/cpu.cfs_period_us": "100000\n", "cpu/cpu.cfs_quota_us": "-1\n"}
    quota(root, files, "3:cpu,cpuacct:/a\n2:memory:/m\n")
    assert num_usable_cores(root) == 1


def test_the_real_machine() -> None:
    assert set(usable_cores()) <= os.sched_getaffinity(0)
    assert 1 <= num_usable_cores() <= len(usable_cores())


def test_lists_of_cores() -> None:
    assert parse_core_list("0-3,8") == [0, 1, 2, 3, 8]
    assert parse_core_list(" 5 , 1-2") == [5, 1, 2]


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,1", "0-2,2", "1,,2"])
def test_invalid_lists_of_cores(text: str) -> None:
    with pytest.raises(ValueError, match="core"):
        parse_core_list(text)

"""The CPU cores that this process may use, in the order in which threads should be bound to them.

Reads `/sys`; binds nothing.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> list[int]:
    """Return one CPU number for each core that this process may run on. Cores of a NUMA node are adjacent.

    Only the first hardware thread of a core is returned, because two threads with vector work on one core are no faster
    than one. If the system does not report the topology, every CPU counts as a core.
    """
    allowed = os.sched_getaffinity(0)
    folder = root / "sys/devices/system"
    nodes = {
        number: int(path.name.removeprefix("node"))
        for path in folder.glob("node/node[0-9]*")
        for number in _read_list(path / "cpulist")
    }
    seen: set[int] = set()
    cores = []
    for number in sorted(allowed):
        if number not in seen:
            seen |= {number, *_read_list(folder / f"cpu/cpu{number}/topology/thread_siblings_list")}
            cores.append(number)
    return sorted(cores, key=lambda number: (nodes.get(number, 0), number))


def num_usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may keep busy: all `usable_cores`, or fewer if its container has a quota."""
    quotas = [_quota(group) for group in _cgroups(root)]
    return max(1, min(len(usable_cores(root)), *(math.ceil(quota) for quota in quotas if quota), 1 << 20))


def parse_core_list(text: str) -> list[int]:
    """Return the numbers of a list such as "0-3,8", in order.

    Raises:
        ValueError: the text is not such a list, or names a core twice.
    """
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"{text!r} is not a list of cores such as 0-3,8")
        numbers += range(int(first), int(last if dash else first) + 1)
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"{text!r} names no core, or one twice")
    return numbers


def _read_list(path: Path) -> Iterable[int]:
    try:
        text = path.read_text().strip()
        return parse_core_list(text) if text else []
    except (OSError, ValueError):
        return []


def _cgroups(root: Path) -> list[Path]:
    """Return the folders of the control groups that may limit the CPU time of this process."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            top = base / "cpu" if controllers else base
            own = top / path.lstrip("/")
            groups += [group for group in (own, *own.parents) if group.is_relative_to(top)]
    return groups


def _quota(group: Path) -> float | None:
    """Return how many cores a control group may keep busy. Return None if there is no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((group / name).read_text() for name in names).split()
        except OSError:
            continue
        if words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None

"""The number of threads depends on the work and on the cores that other processes leave idle."""

import ctypes
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from octavo.kernels.linear.native import NativeProduct
from octavo.kernels.linear.packing import pack_plain
from octavo.kernels.native.arguments import ProgramArguments, StepArguments
from octavo.kernels.native.library import NativeLibrary
from octavo.kernels.native.threads import (
    CROWDED_WINDOWS,
    MAX_RETRY_S,
    SMALL_WORK,
    TRIAL_S,
    WINDOW_S,
    ThreadPolicy,
    bind_threads,
)

SECOND = 1_000_000_000
PERIOD_S = 1.05 * WINDOW_S
MAIN, HELPER = threading.get_native_id(), 4711


class Machine:
    """A faked `/proc`, a clock, and a library whose pool has one thread."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 100.0
        self.usage = {MAIN: [0, 0], HELPER: [0, 0]}
        self.idle_ticks = 0.0
        self.offered_ns = 0
        self._write()

    def function(self, name: str, *_: object):
        if name == "offered_ns":
            return lambda: self.offered_ns
        assert name == "thread_ids"

        def write(numbers, count: int) -> int:
            numbers[0] = HELPER
            return 1

        return write

    def clock(self) -> float:
        return self.now

    def pass_time(self, seconds: float, *, waiting: float, idle_cores: float, offered: float = 0.0) -> None:
        """Let each thread be at work for all the time, and wait for a core for a share of it.

        `offered`: the part of both threads' waiting in which they had offered their cores.
        """
        self.now += seconds
        self.offered_ns += int(2 * seconds * waiting * offered * SECOND)
        for usage in self.usage.values():
            usage[0] += int(seconds * (1 - waiting) * SECOND)
            usage[1] += int(seconds * waiting * SECOND)
        self.idle_ticks += seconds * idle_cores * os.sysconf("SC_CLK_TCK")
        self._write()

    def _write(self) -> None:
        for thread, (running, waiting) in self.usage.items():
            self._put(f"proc/self/task/{thread}/schedstat", f"{running} {waiting} 5\n")
        core = min(os.sched_getaffinity(0))
        idle = f"cpu{core} 10 0 10 {int(self.idle_ticks)} 0 0 0"
        self._put("proc/stat", f"cpu 1 1 1 999 1\n{idle}\ncpu9999 0 0 0 777777 0\nintr 5\n")

    def _put(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # to write over a file takes some file systems milliseconds
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def policy_of(machine: Machine, max_threads: int = 2) -> ThreadPolicy:
    return ThreadPolicy(machine, max_threads, clock=machine.clock, root=machine.root)


def crowd(machine: Machine, policy: ThreadPolicy, *, waiting: float = 0.33) -> int:
    """Have the threads wait for cores until one should be taken away; return the number then."""
    for _ in range(CROWDED_WINDOWS):
        machine.pass_time(PERIOD_S, waiting=waiting, idle_cores=0)
        count = policy.choose(SMALL_WORK)
    return count


def test_all_threads_on_a_quiet_machine(machine: Machine) -> None:
    policy = policy_of(machine)
    for _ in range(20):
        machine.pass_time(PERIOD_S, waiting=0.02, idle_cores=0)
        assert policy.choose(SMALL_WORK) == 2


def test_a_moment_of_another_process_takes_no_thread_away(machine: Machine) -> None:
    policy = policy_of(machine)
    for _ in range(10):
        for waiting in (*[0.4] * (CROWDED_WINDOWS - 1), 0.0):
            machine.pass_time(PERIOD_S, waiting=waiting, idle_cores=0)
            assert policy.choose(SMALL_WORK) == 2


def test_time_on_offered_cores_takes_no_thread_away(machine: Machine) -> None:
    policy = policy_of(machine, max_threads=8)
    for _ in range(2 * CROWDED_WINDOWS):
        machine.pass_time(PERIOD_S, waiting=0.33, idle_cores=0, offered=0.95)
        assert policy.choose(SMALL_WORK) == 8
    for _ in range(CROWDED_WINDOWS):
        machine.pass_time(PERIOD_S, waiting=0.33, idle_cores=0, offered=0.5)
        count = policy.choose(SMALL_WORK)
    assert count == 7


def test_one_thread_for_little_work(machine: Machine) -> None:
    assert policy_of(machine).choose(SMALL_WORK - 1) == 1


def test_fewer_threads_beside_a_busy_process(machine: Machine) -> None:
    policy = policy_of(machine)
    assert crowd(machine, policy) == 1
    for _ in range(100):
        machine.pass_time(PERIOD_S, waiting=0, idle_cores=0)
        assert policy.choose(SMALL_WORK) == 1, "no core is idle, so there is nothing to try"


def test_threads_come_back_when_a_core_is_idle(machine: Machine) -> None:
    policy = policy_of(machine)
    assert crowd(machine, policy) == 1
    start = machine.now
    while policy.choose(SMALL_WORK) == 1:
        machine.pass_time(PERIOD_S, waiting=0, idle_cores=1)
    assert machine.now - start < 0.5


def test_trials_that_fail_become_rare(machine: Machine) -> None:
    """A neighbour that sleeps whenever one thread computes, and works whenever two do."""
    policy = policy_of(machine)
    trials = []
    for _ in range(300):
        count = policy.choose(SMALL_WORK)
        machine.pass_time(PERIOD_S, waiting=0.33 if count == 2 else 0, idle_cores=0 if count == 2 else 1)
        trials += (
            [machine.now]
            if count == 2 and (not trials or machine.now - trials[-1] > (CROWDED_WINDOWS + 1) * WINDOW_S)
            else []
        )
    waits = [later - earlier for earlier, later in pairwise(trials)]
    assert waits[0] < 0.9 and waits[1] < 1.3
    assert waits == pytest.approx(sorted(waits), abs=2 * WINDOW_S)
    assert waits[-1] == pytest.approx(MAX_RETRY_S, abs=(CROWDED_WINDOWS + 3) * WINDOW_S)


def test_a_trial_that_lasts_is_forgotten(machine: Machine) -> None:
    policy = policy_of(machine)
    for _ in range(3):
        assert crowd(machine, policy) == 1
        start = machine.now
        while policy.choose(SMALL_WORK) == 1:
            machine.pass_time(PERIOD_S, waiting=0, idle_cores=1)
        assert machine.now - start < 0.5, "the wait has not grown"
        for _ in range(int(2 * TRIAL_S / WINDOW_S)):
            machine.pass_time(PERIOD_S, waiting=0, idle_cores=0)
            assert policy.choose(SMALL_WORK) == 2


def test_many_threads_give_way_one_by_one(machine: Machine) -> None:
    policy = policy_of(machine, max_threads=4)
    assert [crowd(machine, policy, waiting=0.5) for _ in range(5)] == [3, 2, 1, 1, 1]


def test_a_kernel_that_tells_nothing_gets_all_threads(machine: Machine, tmp_path: Path) -> None:
    policy = ThreadPolicy(machine, 2, clock=machine.clock, root=tmp_path / "nothing")
    machine.pass_time(PERIOD_S, waiting=1, idle_cores=0)
    assert policy.choose(SMALL_WORK) == 2


def run_nothing(library: NativeLibrary, num_threads: int) -> None:
    program = ProgramArguments(None, 0, None, None)
    call = library.function("run", [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64])
    call(ctypes.addressof(program), ctypes.addressof(StepArguments()), num_threads)


def pool_threads(library: NativeLibrary) -> list[int]:
    ids = library.function("thread_ids", [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64)
    numbers = (ctypes.c_int64 * 64)()
    return list(numbers[: ids(numbers, 64)])


def test_threads_of_the_pool(native_library: NativeLibrary) -> None:
    run_nothing(native_library, 3)
    threads = pool_threads(native_library)
    assert len(threads) >= 2 and threading.get_native_id() not in threads
    for thread in threads:
        folder = Path(f"/proc/self/task/{thread}")
        assert (folder / "comm").read_text() == "octavo-kernels\n"
        blocked = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("SigBlk"))
        assert int(blocked.split()[1], 16) & 1 << 14, "SIGTERM is the main thread's"


def test_policy_reads_the_real_machine(native_library: NativeLibrary) -> None:
    policy = ThreadPolicy(native_library, 2)
    run_nothing(native_library, 2)
    policy._end_window(policy._window_start + 1.0)
    run_nothing(native_library, 2)
    assert policy._usage.keys() >= {threading.get_native_id()}
    assert policy._idle_ticks > 0


def test_bound_threads_stay_on_their_cores(native_library: NativeLibrary) -> None:
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    try:
        bind_threads(native_library, cores)
        assert os.sched_getaffinity(0) == {cores[0]}
        for thread, core in zip(pool_threads(native_library), cores[1:], strict=False):
            assert os.sched_getaffinity(thread) == {core}
    finally:
        os.sched_setaffinity(0, before)
        for thread in pool_threads(native_library):
            os.sched_setaffinity(thread, before)


def test_a_thread_that_leaves_a_shared_core_may_still_run_on_it(native_library: NativeLibrary) -> None:
    product = NativeProduct(native_library, pack_plain(native_library, torch.zeros(64, 64)))
    rows, out = torch.zeros(1, 64), torch.zeros(1, 64)
    product.multiply(rows, out, 2)
    before = os.sched_getaffinity(0)
    core = {min(before)}
    try:
        for thread in (0, *pool_threads(native_library)):
            os.sched_setaffinity(thread, core)  # all of them move to one core
        for thread in pool_threads(native_library):
            os.sched_setaffinity(thread, before)
        for _ in range(20):  # each waits at a barrier
            product.multiply(rows, out, 2)
        assert all(os.sched_getaffinity(thread) == before for thread in pool_threads(native_library))
    finally:
        for thread in (0, *pool_threads(native_library)):
            os.sched_setaffinity(thread, before)


def test_a_policy_sees_the_cores_of_all_bound_threads(native_library: NativeLibrary, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    run_nothing(native_library, 2)
    cores = sorted(before)[:2]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("".join(f"cpu{core} 0 0 0 10 0\n" for core in cores))
    try:
        bind_threads(native_library, cores)
        policy = ThreadPolicy(native_library, 2, root=tmp_path)
        assert policy._idle_ticks == 10 * len(cores)
    finally:
        os.sched_setaffinity(0, before)
        for thread in pool_threads(native_library):
            os.sched_setaffinity(thread, before)


def test_binding_to_a_core_that_is_not_there(native_library: NativeLibrary) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="cannot bind threads to the cores"):
        bind_threads(native_library, [1023])
    assert os.sched_getaffinity(0) == before

"""The fork server that engines of a process share."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from servers import is_running, parent_of
from tiny_models import make_tiny
from waiting import wait_until
from worker_plans import worker_config

from octavo.core_proc.workers.fork_server import ForkServer
from octavo.frontend.fork_server import SharedForkServer
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.fork_server import ForkServerProcess
from octavo.protocol.supervise import Child, ChildExited

START_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    model = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))
    return worker_config(model, max_num_seqs=4, num_threads=1)


@pytest.fixture
def shared() -> Iterator[SharedForkServer]:
    shared = SharedForkServer()
    yield shared
    shared.close()


@pytest.fixture
def spec(config: ResolvedConfig, tmp_path: Path) -> WorkerSpec:
    addresses = {"plan_address": f"ipc://{tmp_path}/plans", "result_address": f"ipc://{tmp_path}/results"}
    return WorkerSpec(config=config, rank=0, world_size=1, **addresses)


def wait_until_ready(child: Child) -> None:
    while not isinstance(message := child.receive(START_TIMEOUT_S), WorkerReady):
        assert message is not None, "timed out"


def test_workers_end_with_their_core_and_others_stay(shared: SharedForkServer, spec: WorkerSpec) -> None:
    cores = [ForkServer(shared.connect().detach()) for _ in range(2)]
    children = [core.spawn(spec, "worker 0") for core in cores]
    for child in children:
        wait_until_ready(child)
    gone, stays = (child.pid for child in children)
    os.kill(gone, signal.SIGSTOP)  # it cannot see that its core is gone
    cores[0].kill()
    wait_until(lambda: not is_running(gone), timeout_s=TIMEOUT_S)
    assert not cores[0].is_alive
    with pytest.raises(ChildExited):
        children[0].receive(TIMEOUT_S)
    assert cores[1].is_alive and children[1].is_alive and is_running(stays)
    # The process that has started the server goes, but not the second core.
    shared.close()
    again = cores[1].spawn(spec, "worker 0")
    wait_until_ready(again)
    server = parent_of(stays)
    assert parent_of(again.pid) == server
    cores[1].kill()
    wait_until(lambda: not any(map(is_running, (stays, again.pid, server))), timeout_s=TIMEOUT_S)
    for child in [*children, again]:
        child.close()


def test_a_worker_has_the_surroundings_of_its_core(
    shared: SharedForkServer, spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ForkServer(shared.connect().detach())
    monkeypatch.setenv("OCTAVO_NEW", "since the server was started")
    monkeypatch.chdir(tmp_path)
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        child = core.spawn(spec, "worker 0")
    finally:
        os.sched_setaffinity(0, processors)
    wait_until_ready(child)
    process = Path(f"/proc/{child.pid}")
    assert process.joinpath("cwd").readlink() == tmp_path
    assert os.sched_getaffinity(child.pid) == {min(processors)}
    for number in (1, 2):
        assert process.joinpath(f"fd/{number}").readlink() == Path("/proc/self/fd/2").readlink()
    core.kill()
    child.wait(TIMEOUT_S)
    child.close()


def test_a_worker_reads_the_variables_of_its_core(
    shared: SharedForkServer, spec: WorkerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ForkServer(shared.connect().detach())
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    config = msgspec.structs.replace(spec.config, cpu_kernels="native")
    child = core.spawn(msgspec.structs.replace(spec, config=config), "worker 0")
    with pytest.raises(ChildExited, match="/no/compiler"):
        while child.receive(START_TIMEOUT_S) is not None:
            pass
    child.close()
    core.kill()


def test_a_server_that_nobody_uses_ends_without_losing_a_request(spec: WorkerSpec) -> None:
    process = ForkServerProcess(dies_with_thread=False, idle_s=0.01)
    core = ForkServer(process.connect().detach())
    child = core.spawn(spec, "worker 0")
    wait_until_ready(child)
    assert process.is_alive
    core.kill()
    assert process.wait() == 0
    with pytest.raises(OSError):
        process.connect()
    process.kill()
    child.close()


def test_a_server_is_started_again(shared: SharedForkServer, spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = []
    for change in ("none", "none", "killed", "a variable of a library"):
        if change == "killed":
            os.kill(servers[-1], signal.SIGKILL)
            wait_until(lambda: not is_running(servers[-1]), timeout_s=TIMEOUT_S)
        elif change != "none":
            monkeypatch.setenv("OMP_NUM_THREADS", "2")
        core = ForkServer(shared.connect().detach())
        child = core.spawn(spec, "worker 0")
        wait_until_ready(child)
        servers.append(parent_of(child.pid))
        core.kill()
        child.wait(TIMEOUT_S)
        child.close()
    assert servers[0] == servers[1]
    assert len(set(servers)) == 3

"""Workers that are forked from a process with torch: they start, end and fail as those that are started by name."""

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from orphans import assert_dies_with_parent
from servers import is_running
from tiny_models import make_tiny
from worker_plans import worker_config

from octavo.core_proc.workers.fork_server import ForkServer
from octavo.protocol import fork_server as fork_server_module
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.lifecycle import EXIT_OK, EXIT_STARTUP_FAILED
from octavo.protocol.supervise import Child, ChildExited

START_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    model = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))
    return worker_config(model, max_num_seqs=4, num_threads=1)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.kill()


def spec_of(config: ResolvedConfig, folder: Path, rank: int = 0) -> WorkerSpec:
    addresses = {"plan_address": f"ipc://{folder}/plans", "result_address": f"ipc://{folder}/results"}
    return WorkerSpec(config=config, rank=rank, world_size=1, **addresses)


def wait_until_ready(child: Child) -> None:
    while not isinstance(message := child.receive(START_TIMEOUT_S), WorkerReady):
        assert message is not None, "timed out"


def test_forked_workers_have_their_files_and_report_how_they_end(
    server: ForkServer, config: ResolvedConfig, tmp_path: Path
) -> None:
    shared = os.memfd_create("shared")
    children = [server.spawn(spec_of(config, tmp_path, rank), f"worker {rank}", [shared]) for rank in range(2)]
    for child in children:
        wait_until_ready(child)
        assert os.stat(f"/proc/{child.pid}/fd/{shared}").st_ino == os.fstat(shared).st_ino
        assert b"octavo.worker_proc\0" in Path(f"/proc/{child.pid}/cmdline").read_bytes()
    os.close(shared)
    first, second = children
    first.kill()
    with pytest.raises(ChildExited, match="worker 0 was killed by SIGKILL"):
        first.receive(TIMEOUT_S)
    assert second.is_alive
    second.terminate()
    assert second.wait(0.2) is None, "the core drains first"
    second.terminate()
    assert second.wait(TIMEOUT_S) == EXIT_OK
    for child in children:
        child.close()


def test_ctrl_c_while_a_server_starts_is_for_the_core(
    config: ResolvedConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would print a traceback."""
    server = ForkServer()
    os.kill(server.pid, signal.SIGINT)
    model = msgspec.structs.replace(config.model, model_path=str(tmp_path / "nowhere"))
    child = server.spawn(spec_of(msgspec.structs.replace(config, model=model), tmp_path), "worker 0")
    with pytest.raises(ChildExited, match="nowhere"):
        while child.receive(START_TIMEOUT_S) is not None:
            pass
    assert server.is_alive and "Traceback" not in capfd.readouterr().err
    child.close()
    server.kill()


def test_only_one_thread_runs_where_workers_are_forked(
    server: ForkServer, config: ResolvedConfig, tmp_path: Path
) -> None:
    child = server.spawn(spec_of(config, tmp_path), "worker 0")
    wait_until_ready(child)
    assert len(os.listdir(f"/proc/{server.pid}/task")) == 1
    child.kill()
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    child.close()


def test_a_worker_ends_while_its_server_is_stopped(server: ForkServer, config: ResolvedConfig, tmp_path: Path) -> None:
    child = server.spawn(spec_of(config, tmp_path), "worker 0")
    wait_until_ready(child)
    os.kill(server.pid, signal.SIGSTOP)
    child.kill()
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    os.kill(server.pid, signal.SIGCONT)
    child.close()


def test_a_failed_start_of_a_forked_worker_has_its_reason(
    server: ForkServer, config: ResolvedConfig, tmp_path: Path
) -> None:
    model = msgspec.structs.replace(config.model, model_path=str(tmp_path / "nowhere"))
    child = server.spawn(spec_of(msgspec.structs.replace(config, model=model), tmp_path), "worker 0")
    with pytest.raises(ChildExited, match="nowhere") as raised:
        while child.receive(START_TIMEOUT_S) is not None:
            pass
    assert raised.value.code == EXIT_STARTUP_FAILED
    child.close()


def test_a_launch_spec_may_be_larger_than_a_pipe(server: ForkServer, config: ResolvedConfig, tmp_path: Path) -> None:
    hf_config = {**config.model.hf_config, "large": "x" * 2**21}
    model = msgspec.structs.replace(config.model, hf_config=hf_config)
    child = server.spawn(spec_of(msgspec.structs.replace(config, model=model), tmp_path), "worker 0")
    with pytest.raises(ChildExited, match=r"'large' .* is unknown"):
        while child.receive(START_TIMEOUT_S) is not None:
            pass
    child.close()


def test_a_worker_gets_files_with_high_numbers(server: ForkServer, config: ResolvedConfig, tmp_path: Path) -> None:
    shared = os.memfd_create("shared")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.dup(shared) for _ in range(min(soft - 100, 520 - shared))]
    inherited = [fillers[-1], fillers[-2], fillers[-3]]
    try:
        child = server.spawn(spec_of(config, tmp_path), "worker 0", inherited)
    finally:
        for descriptor in fillers:
            os.close(descriptor)
    assert max(inherited) >= 512, "where a server receives its own"
    wait_until_ready(child)
    for descriptor in inherited:
        assert os.stat(f"/proc/{child.pid}/fd/{descriptor}").st_ino == os.fstat(shared).st_ino
    os.close(shared)
    child.kill()
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    child.close()


def test_ready_workers_end_with_their_server(config: ResolvedConfig, tmp_path: Path) -> None:
    server = ForkServer()
    children = [server.spawn(spec_of(config, tmp_path, rank), f"worker {rank}") for rank in range(2)]
    for child in children:
        wait_until_ready(child)
    pids = [child.pid for child in children]
    num_open = len(os.listdir("/proc/self/fd"))
    os.kill(server.pid, signal.SIGKILL)
    for child, pid in zip(children, pids, strict=True):
        assert child.wait(TIMEOUT_S) == -signal.SIGKILL
        assert not is_running(pid), "its memory is free"
        with pytest.raises(ChildExited, match="was killed by SIGKILL"):
            child.receive(TIMEOUT_S)
        child.close()
    assert not server.is_alive
    assert len(os.listdir("/proc/self/fd")) == num_open - 2 * 4, "standard input, control, status and process"
    server.kill()


def test_a_server_that_cannot_import_says_so(
    config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "MODULE", "octavo.worker_proc.nowhere")
    server = ForkServer()
    child = server.spawn(spec_of(config, tmp_path), "worker 0")
    with pytest.raises(ChildExited, match="worker 0 exited with code 1"):
        child.receive(TIMEOUT_S)
    child.close()
    server.kill()


def test_workers_die_with_their_server_and_are_not_forked_after_a_kill(config: ResolvedConfig, tmp_path: Path) -> None:
    server = ForkServer()
    child = server.spawn(spec_of(config, tmp_path), "worker 0")
    child.kill()  # while the server imports torch
    assert child.wait(TIMEOUT_S) == -signal.SIGKILL
    assert not server.is_alive
    with pytest.raises(OSError):
        server.spawn(spec_of(config, tmp_path), "worker 0")
    child.close()


def test_workers_die_with_the_core(config: ResolvedConfig, tmp_path: Path) -> None:
    assert_dies_with_parent(spec_of(config, tmp_path), 'ForkServer().spawn(spec, "worker")', tmp_path)

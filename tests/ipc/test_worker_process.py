"""The real worker process, with the test as its core: start, cache, steps, stop, and failures."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq
from orphans import assert_dies_with_parent
from servers import cpu_seconds, send_signal
from subscribers import wait_for_subscribers
from tiny_models import make_tiny
from waiting import wait_until
from worker_plans import spec, worker_config

from octavo.core_proc.workers.fork_server import ForkServer
from octavo.frontend.fork_server import fork_server
from octavo.protocol.channel import Publisher, ResultPull
from octavo.protocol.config import DeviceFacts, ResolvedConfig
from octavo.protocol.control import PhaseDone, WorkerReady, WorkerSpec
from octavo.protocol.ids import pack_ids
from octavo.protocol.lifecycle import EXIT_FAILED, EXIT_OK, EXIT_STARTUP_FAILED
from octavo.protocol.steps import Admitted, Scheduled, StepPlan, StepResult, TokenMask, TokenMasks
from octavo.protocol.supervise import Child, ChildExited
from octavo.protocol.worker_commands import (
    Acknowledged,
    AllocateCache,
    CacheReady,
    CommandFailed,
    Profile,
    StopWorker,
    WarmedUp,
    WarmUp,
)

TIMEOUT_S = 60.0
START_TIMEOUT_S = 300.0
"""Between two life signs of a start: the first one after a change of the kernels compiles them."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ResolvedConfig:
    directory = make_tiny("LlamaForCausalLM", tmp_path_factory.mktemp("tiny"))
    return worker_config(directory, max_num_seqs=4, num_threads=1)


@dataclass
class Worker:
    """A worker process and the core's ends of its sockets."""

    child: Child
    commands: Publisher
    replies: ResultPull

    def wait_until_ready(self) -> tuple[list[str], DeviceFacts]:
        """Return the finished phases and the facts."""
        phases = []
        while not isinstance(message := self.child.receive(START_TIMEOUT_S), WorkerReady):
            assert message is not None, "timed out"
            if isinstance(message, PhaseDone):
                phases.append(message.phase)
        wait_for_subscribers(self.commands, 1, TIMEOUT_S)
        return phases, message.facts

    def ask(self, command: Any) -> Any:
        self.commands.send(command)
        return self.replies.receive(TIMEOUT_S)

    def wait_for_exit(self) -> ChildExited:
        """Everything the worker still says, and then its end."""
        with pytest.raises(ChildExited) as exited:
            while self.child.receive(TIMEOUT_S) is not None:
                pass
        return exited.value


@contextlib.contextmanager
def worker(config: ResolvedConfig, folder: Path, rank: int = 0, *, is_forked: bool = True) -> Iterator[Worker]:
    """Start a worker: forked from the server of this process, or by name, with two seconds of imports."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    commands = Publisher(context, f"ipc://{folder}/plans")
    replies = ResultPull(context, f"ipc://{folder}/results")
    spec = worker_spec(config, commands.address, replies.address, rank)
    server = ForkServer(fork_server.connect().detach()) if is_forked else None
    child = server.spawn(spec, "worker") if server else Child.spawn("octavo.worker_proc", spec, "worker")
    try:
        yield Worker(child, commands, replies)
    finally:
        child.kill()
        child.stop(timeout_s=5)
        if server:
            server.kill()
        commands.close()
        replies.close()
        context.term()


def worker_spec(config: ResolvedConfig, plan_address: str, result_address: str, rank: int = 0) -> WorkerSpec:
    return WorkerSpec(config=config, rank=rank, world_size=1, plan_address=plan_address, result_address=result_address)


def plan(sequence: int, token_ids: list[int]) -> StepPlan:
    admitted = Admitted(0, "r", pack_ids(token_ids), len(token_ids), [[3]], spec(logprobs=1))
    return StepPlan(sequence, [], [admitted], [], [Scheduled(0, 0, len(token_ids), 1)])


@pytest.mark.parametrize("is_forked", [True, False])
def test_from_ready_to_stop(config: ResolvedConfig, tmp_path: Path, is_forked: bool) -> None:
    with worker(config, tmp_path, is_forked=is_forked) as w:
        phases, facts = w.wait_until_ready()
        # Kernels are compiled only where no start before this one has done it.
        phases = [phase for phase in phases if phase != "compiling kernels"]
        assert phases == ["importing torch", "opening the device", "loading weights", "profiling memory"]
        checkpoint_bytes = _safetensors_bytes(Path(config.model.model_path))
        assert checkpoint_bytes <= facts.weights_bytes <= 1.5 * checkpoint_bytes  # packed by whole panels of 64
        assert 0 < facts.free_bytes <= facts.total_bytes
        assert facts.activation_bytes > 0
        assert facts.kv_block_bytes == 2 * 2 * 16 * 2 * 16 * 4  # k and v, layers, tokens, heads, dim, float32
        assert w.ask(AllocateCache(0, num_blocks=[8], max_model_len=64)) == CacheReady(0, rank=0)
        result = w.ask(plan(1, [5, 6, 7]))
        assert isinstance(result, StepResult)
        assert result.sequence == 1
        assert len(result.token_ids) == 1
        assert result.logprobs[0].token_ids[0] == result.token_ids[0]
        traces = tmp_path / "traces"
        assert w.ask(Profile(2, str(traces))) == Acknowledged(2, rank=0)
        w.ask(StepPlan(3, [], [], [], [Scheduled(0, 3, 1, 1)]))
        assert w.ask(Profile(4, None)) == Acknowledged(4, rank=0)
        (trace,) = traces.iterdir()
        assert trace.name.split("-")[:2] == ["worker", "0"]
        events = json.loads(trace.read_text())["traceEvents"]
        assert {"linear", "paged_attention", "rms_norm"} <= {event["name"] for event in events}
        assert all(event["dur"] >= 0 for event in events)
        w.commands.send(StopWorker(5))
        assert w.wait_for_exit().code == EXIT_OK


def test_a_trace_that_cannot_be_written_does_not_end_the_worker(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        traces = tmp_path / "traces"
        assert w.ask(Profile(0, str(traces))) == Acknowledged(0, rank=0)
        traces.rmdir()
        answer = w.ask(Profile(1, None))
        assert isinstance(answer, Acknowledged) and "No such file" in answer.fault
        (tmp_path / "file").touch()
        answer = w.ask(Profile(2, str(tmp_path / "file")))
        assert isinstance(answer, Acknowledged) and "exists" in answer.fault
        assert w.ask(Profile(3, None)) == Acknowledged(3, rank=0)


def test_other_ranks_compute_but_do_not_answer_steps(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path, rank=1) as w:
        w.wait_until_ready()
        assert w.ask(AllocateCache(0, num_blocks=[8], max_model_len=64)) == CacheReady(0, rank=1)
        warmed_up = w.ask(WarmUp(1))
        assert isinstance(warmed_up, WarmedUp)
        assert (warmed_up.sequence, warmed_up.rank, warmed_up.num_graphs, warmed_up.graph_bytes) == (1, 1, 0, 0)
        w.commands.send(plan(2, [5, 6, 7]))
        assert w.ask(Profile(3, None)) == Acknowledged(3, rank=1)


def test_a_command_that_fails_is_answered_and_ends_the_worker(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        w.ask(AllocateCache(0, num_blocks=[8], max_model_len=64))
        failed = w.ask(StepPlan(1, [], [], [], [Scheduled(2, 0, 1, 1)]))
        assert isinstance(failed, CommandFailed)
        assert (failed.sequence, failed.rank, failed.error_type) == (1, 0, "ProtocolError")
        assert "slot 2" in failed.message
        assert "executor.py" in failed.traceback
        assert w.wait_for_exit().code == EXIT_FAILED


@pytest.mark.parametrize("cpu_kernels", ["native", "torch"])
def test_a_cache_without_memory_names_the_flags(config: ResolvedConfig, tmp_path: Path, cpu_kernels: Any) -> None:
    with worker(msgspec.structs.replace(config, cpu_kernels=cpu_kernels), tmp_path) as w:
        w.wait_until_ready()
        failed = w.ask(AllocateCache(0, num_blocks=[10**11], max_model_len=64))
        assert isinstance(failed, CommandFailed)
        assert failed.error_type == "NotEnoughMemoryError"
        assert "--num-gpu-blocks-override" in failed.message
        assert w.wait_for_exit().code == EXIT_FAILED


def test_missing_weights_are_the_root_cause(config: ResolvedConfig, tmp_path: Path) -> None:
    model = make_tiny("LlamaForCausalLM", tmp_path / "model")
    (model / "model.safetensors").unlink()
    broken = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model_path=str(model)))
    with worker(broken, tmp_path) as w:
        exited = w.wait_for_exit()
    assert exited.code == EXIT_STARTUP_FAILED
    assert exited.failure is not None
    assert exited.failure.phase == "loading weights"
    assert exited.failure.error_type == "ConfigError"
    expected = (
        f"no weights of format safetensors in {model}: neither model.safetensors.index.json nor model.safetensors"
    )
    assert exited.failure.message == expected
    assert exited.failure.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_cannot_be_had_is_named(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(msgspec.structs.replace(config, device="cuda"), tmp_path) as w:
        exited = w.wait_for_exit()
    assert exited.failure is not None
    assert exited.failure.phase == "opening the device"
    assert "CUDA" in exited.failure.message or "GPU" in exited.failure.message


def test_one_sigterm_is_left_to_the_core_and_two_end_the_worker(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        w.child.terminate()
        assert w.ask(AllocateCache(0, num_blocks=[8], max_model_len=64)) == CacheReady(0, rank=0)
        w.child.terminate()
        assert w.wait_for_exit().code == EXIT_OK


def test_an_idle_worker_uses_no_processor_time(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        w.ask(AllocateCache(0, num_blocks=[8], max_model_len=64))
        w.ask(plan(1, [5, 6, 7]))

        def is_idle() -> bool:
            before = cpu_seconds(w.child.pid)
            time.sleep(0.5)
            return cpu_seconds(w.child.pid) - before < 0.015  # a tick is 10 ms

        wait_until(is_idle)


def test_a_worker_dies_with_its_parent(config: ResolvedConfig, tmp_path: Path) -> None:
    spec = worker_spec(config, f"ipc://{tmp_path}/plans", f"ipc://{tmp_path}/results")
    assert_dies_with_parent(spec, 'Child.spawn("octavo.worker_proc", spec, "worker")', tmp_path)


def _safetensors_bytes(folder: Path) -> int:
    from safetensors.torch import load_file

    return sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def masked_plan(sequence: int, start: int, num_tokens: int) -> StepPlan:
    """A step of the request of `plan` that awaits masks."""
    return StepPlan(sequence, [], [], [], [Scheduled(0, start, num_tokens, 1)], awaits_masks=True)


def mask(config: ResolvedConfig, token_id: int) -> TokenMask:
    words = bytearray(4 * -(-config.model.vocab_size // 32))
    words[token_id // 8] |= 1 << token_id % 8
    return 0, 0, bytes(words)


def test_steps_wait_for_their_masks_and_plans_for_the_steps(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        w.ask(AllocateCache(0, [8], 64))
        w.ask(plan(1, [5, 6, 7]))
        w.commands.send(masked_plan(2, 3, 1))
        w.commands.send(masked_plan(3, 4, 1))
        assert w.replies.receive(0.3) is None, "no token is drawn before its mask is there"
        first = w.ask(TokenMasks.pack(4, [mask(config, 9)]))
        assert (first.sequence, first.token_ids.tolist()) == (2, [9])
        assert w.replies.receive(0.3) is None
        second = w.ask(TokenMasks.pack(5, [mask(config, 11)]))
        assert (second.sequence, second.token_ids.tolist()) == (3, [11])
        failed = w.ask(TokenMasks.pack(6, []))
        assert isinstance(failed, CommandFailed) and "no step awaits any" in failed.message


def test_a_worker_that_waits_for_masks_can_be_ended(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        w.ask(AllocateCache(0, [8], 64))
        w.ask(plan(1, [5, 6, 7]))
        w.commands.send(masked_plan(2, 3, 1))
        assert w.replies.receive(0.3) is None
        send_signal(w.child.pid, signal.SIGTERM)
        w.child.terminate()
        assert w.wait_for_exit().code == EXIT_FAILED


def test_a_worker_that_waits_for_masks_obeys_stop(config: ResolvedConfig, tmp_path: Path) -> None:
    with worker(config, tmp_path) as w:
        w.wait_until_ready()
        w.ask(AllocateCache(0, [8], 64))
        w.ask(plan(1, [5, 6, 7]))
        w.commands.send(masked_plan(2, 3, 1))
        w.commands.send(masked_plan(3, 4, 1))
        assert w.replies.receive(0.3) is None
        w.commands.send(StopWorker(4))
        assert w.wait_for_exit().code == EXIT_OK

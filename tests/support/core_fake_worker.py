"""A worker process without a model: follows the protocol, computes nothing. Started by name.

Its model's `architecture` names the fault to show; see `FAULTS`.
"""

import os
import signal
import time

import zmq
from simulation.worker import SimulatedWorker

from octavo.protocol.channel import ResultPush, Subscriber
from octavo.protocol.config import CacheGroupSpec, DeviceFacts
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.curve import GroupKeys
from octavo.protocol.errors import ConfigError, NotEnoughMemoryError
from octavo.protocol.lifecycle import StartupReporter, StopSignal, run_child
from octavo.protocol.steps import StepPlan
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

FAILING_STEP = 5

FAULTS = {
    "": "none",
    "no start": "fails to start, and reports the reason",
    "vanish": "dies while it loads",
    "killed": "is killed while it loads",
    "crowded": "finds no memory for its weights",
    "cold": "reports an error when it is told to warm up",
    "raise": "reports an error at its fifth step, if it is one of the first `NUM_FAILING`",
    "die": "dies in its last rank at its fifth step, if it is one of the first `NUM_FAILING`",
    "die later": "dies when it has answered its fifth step, if it is one of the first `NUM_FAILING`",
    "mortal": "dies at its fifth step",
    "hang": "stops at its fifth step, if it is the first of its engine",
    "slow": "takes 50 ms for each step",
    "full": "can write no trace in its last rank",
    "poison": "dies of prompts that contain the token `POISON`",
    "fatal": "dies of every step",
    "only once": "fails to start, unless it is the first of its engine",
    "second try": "fails to start, if it is the second of its engine",
    "stay": "never becomes ready, if it is the second of its engine",
}
LAST = "last: "
"""Prefix of a fault that only the last rank shows."""

NUM_FAILING = 3
POISON = 13


def fault_of(spec: WorkerSpec) -> str:
    """Return the fault that this rank shows."""
    fault = spec.config.model.architecture
    if not fault.startswith(LAST):
        return fault
    return fault.removeprefix(LAST) if spec.rank == spec.world_size - 1 else ""


def load(fault: str, generation: int) -> None:
    """Apply the fault while a worker loads, if it belongs there."""
    if fault == "no start" or (fault == "only once" and generation) or (fault == "second try" and generation == 1):
        raise ConfigError("the model file is wrong", phase="loading weights", hint="fetch it again")
    if fault == "vanish":
        os._exit(9)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "crowded":
        raise NotEnoughMemoryError("no memory for 9 weights", hint="use a larger machine")
    if fault == "stay" and generation == 1:
        time.sleep(60)


def strike(fault: str, spec: WorkerSpec, plan: StepPlan, generation: int, poisoned: set[int]) -> None:
    """Apply the fault before a step is computed, if it belongs there."""
    is_failing_step = plan.sequence == FAILING_STEP
    poisoned -= set(plan.released)
    poisoned |= {
        admitted.slot for admitted in plan.admitted if POISON in admitted.token_ids[: admitted.num_prompt_tokens]
    }
    if fault == "die" and is_failing_step and spec.rank == spec.world_size - 1 and generation < NUM_FAILING:
        os._exit(9)
    if fault == "mortal" and is_failing_step:
        os._exit(9)
    if fault == "fatal" or (fault == "poison" and any(part.slot in poisoned for part in plan.scheduled)):
        os._exit(9)
    if fault == "hang" and is_failing_step and generation == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "slow":
        time.sleep(0.05)


def answer_of(command: WarmUp | Profile, spec: WorkerSpec) -> WarmedUp | CommandFailed | Acknowledged:
    """Return the reply to a command that computes nothing."""
    if isinstance(command, WarmUp):
        if fault_of(spec) == "cold":
            return CommandFailed(command.sequence, spec.rank, "NotEnoughMemoryError", "no memory for graphs", "...")
        return WarmedUp(command.sequence, spec.rank, 0.5, num_graphs=3, graph_bytes=2**20)
    is_full = fault_of(spec) == "full" and spec.rank == spec.world_size - 1
    return Acknowledged(command.sequence, spec.rank, "the disk is full" if is_full else "")


def main(spec: WorkerSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    fault = fault_of(spec)
    context = zmq.Context()
    keys = GroupKeys(spec.place.secret.encode()).client if spec.place and spec.place.secret else None
    commands = Subscriber(context, spec.plan_address, keys)
    replies = ResultPush(context, spec.result_address, keys)
    generation = spec.generation
    poisoned: set[int] = set()
    with reporter.phase("loading weights"):
        load(fault, generation)
    assert (spec.facts is None) == (generation == 0), "only the first workers measure"
    facts = spec.facts or DeviceFacts(
        rank=spec.rank,
        device_name="fake",
        total_bytes=2**30,
        free_bytes=2**20,
        weights_bytes=2**18,
        activation_bytes=2**10,
        cache_groups=[CacheGroupSpec(num_layers=1, block_bytes=2**12)],
    )
    reporter.mark_ready(WorkerReady(facts))
    worker, is_warm = None, False
    while True:
        command = commands.receive()
        match command:
            case AllocateCache():
                worker = SimulatedWorker(spec.config, *command.num_blocks, num_host_blocks=command.num_host_blocks)
                worker.next_sequence = command.sequence + 1
                replies.send(CacheReady(command.sequence, spec.rank))
            case StepPlan():
                assert is_warm, "workers that were restarted warm up too"
                strike(fault, spec, command, generation, poisoned)
                if fault == "raise" and command.sequence == FAILING_STEP and generation < NUM_FAILING:
                    replies.send(CommandFailed(command.sequence, spec.rank, "ValueError", "a broken step", "..."))
                    replies.close()
                    context.destroy(linger=1000)
                    return 1
                result = worker.execute(command)
                if spec.rank == 0:
                    replies.send(result)
                if fault == "die later" and command.sequence == FAILING_STEP and generation < NUM_FAILING:
                    replies.close()
                    context.destroy(linger=1000)
                    os._exit(9)
            case WarmUp() | Profile():
                worker.next_sequence += 1
                is_warm = is_warm or isinstance(command, WarmUp)
                replies.send(answer_of(command, spec))
            case StopWorker():
                return 0


if __name__ == "__main__":
    run_child("Worker", WorkerSpec, main)

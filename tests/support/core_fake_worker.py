"""A worker process without a model: obeys the protocol, computes nothing. Started by name.

What it should do wrong is in its model's `load_format`: "" nothing, "refuse" fails to start, "vanish"
dies while it loads, "raise" and "die" fail at their fifth step, "slow" takes 50 ms for each step, "full" can write
no trace in its last rank.
"""

import os
import time

import zmq
from simulation.worker import SimulatedWorker

from octavo.protocol.channel import ResultPush, Subscriber
from octavo.protocol.config import DeviceFacts
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.errors import ConfigError
from octavo.protocol.lifecycle import Reporter, StopSignal, run_child
from octavo.protocol.steps import Acknowledged, AllocateCache, CacheReady, CommandFailed, Profile, StepPlan, Stop

FAILING_STEP = 5


def main(spec: WorkerSpec, reporter: Reporter, stop: StopSignal) -> int:
    fault = spec.config.model.load_format
    context = zmq.Context()
    commands = Subscriber(context, spec.plan_address)
    replies = ResultPush(context, spec.result_address)
    with reporter.phase("loading weights"):
        if fault == "refuse":
            raise ConfigError("the model file is wrong", phase="loading weights", hint="fetch it again")
        if fault == "vanish":
            os._exit(9)
    facts = DeviceFacts(
        rank=spec.rank,
        device_name="fake",
        total_bytes=2**30,
        free_bytes=2**20,
        weights_bytes=2**18,
        activation_bytes=2**10,
        kv_block_bytes=2**12,
    )
    reporter.mark_ready(WorkerReady(facts))
    worker = None
    while True:
        command = commands.receive()
        match command:
            case AllocateCache():
                worker = SimulatedWorker(spec.config, command.num_blocks)
                worker.next_sequence = command.sequence + 1
                replies.send(CacheReady(command.sequence, spec.rank))
            case StepPlan():
                if fault == "die" and command.sequence == FAILING_STEP and spec.rank == spec.world_size - 1:
                    os._exit(9)
                if fault == "raise" and command.sequence == FAILING_STEP:
                    replies.send(CommandFailed(command.sequence, spec.rank, "ValueError", "a broken step", "..."))
                    replies.close()
                    context.destroy(linger=1000)
                    return 1
                if fault == "slow":
                    time.sleep(0.05)
                result = worker.execute(command)
                if spec.rank == 0:
                    replies.send(result)
            case Profile():
                worker.next_sequence += 1
                is_full = fault == "full" and spec.rank == spec.world_size - 1
                replies.send(Acknowledged(command.sequence, spec.rank, "the disk is full" if is_full else ""))
            case Stop():
                return 0


if __name__ == "__main__":
    run_child("Worker", WorkerSpec, main)

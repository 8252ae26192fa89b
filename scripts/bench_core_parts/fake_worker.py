"""A worker process without a model that answers each step at once, or after a fixed time. Started by name."""

import os
import time

import zmq

from bench_core_parts.messages import FACTS, result_of
from octavo.protocol.channel import ResultPush, Subscriber
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.lifecycle import run_child
from octavo.protocol.steps import StepPlan
from octavo.protocol.worker_commands import AllocateCache, CacheReady, WarmedUp, WarmUp

STEP_VARIABLE = "BENCH_CORE_STEP_S"
"""Environment variable with the time of each step in seconds."""


def main(spec, reporter, stop) -> int:
    """Answer commands until told to stop."""
    step_s = float(os.environ.get(STEP_VARIABLE, "0"))
    context = zmq.Context()
    commands = Subscriber(context, spec.plan_address)
    replies = ResultPush(context, spec.result_address)
    reporter.mark_ready(WorkerReady(FACTS))
    while True:
        match commands.receive():
            case StepPlan() as plan:
                if step_s:
                    time.sleep(step_s)
                replies.send(result_of(plan))
            case AllocateCache() as command:
                replies.send(CacheReady(command.sequence, spec.rank))
            case WarmUp() as command:
                replies.send(WarmedUp(command.sequence, spec.rank))
            case _:
                return 0


if __name__ == "__main__":
    run_child("Worker", WorkerSpec, main)

"""A pipeline stage without a model: takes rows, sleeps for a known time, and passes rows on. Started by name.

When it is told to stop, it writes its busy times to a file next to its sockets.
"""

import json
import os
import time
from pathlib import Path

import msgspec
import torch
import zmq
from bench_core_parts.messages import FACTS, result_of

from octavo.kernels.native import library
from octavo.kernels.native.arguments import Matrix
from octavo.kernels.native.direct import run
from octavo.kernels.stage_exchange.link import SharedMemoryLink, link_bytes
from octavo.kernels.stage_exchange.native import ReceiveRowsArguments, SendRowsArguments
from octavo.protocol.channel import ResultPush, Subscriber
from octavo.protocol.control import WorkerReady, WorkerSpec
from octavo.protocol.lifecycle import run_child
from octavo.protocol.steps import StepPlan
from octavo.protocol.worker_commands import AllocateCache, CacheReady, StopWorker, WarmedUp, WarmUp

TIME_VARIABLE = "BENCH_PIPELINE_STAGE_S"
"""Environment variable with the seconds of a step and of each of its tokens, separated by a comma."""

WIDTH = 64


class Stage:
    """One stage: the ends of its links, and its busy times."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._library = library.load()
        self._base_s, self._token_s = map(float, os.environ[TIME_VARIABLE].split(","))
        max_rows = spec.config.max_num_batched_tokens
        self._rows = torch.zeros(max_rows, WIDTH)
        area_bytes = max_rows * WIDTH * 4
        offsets = [index * link_bytes(area_bytes) for index in range(spec.world_size - 1)]
        links = [SharedMemoryLink(spec.exchange_fd, offset, area_bytes) for offset in offsets]
        self._previous = links[spec.rank - 1] if spec.rank > 0 else None
        self._following = links[spec.rank] if spec.rank < len(links) else None
        self.busy: list[tuple[float, float]] = []
        """Begin and end of each step, in seconds of the system's monotonic clock."""

    def compute(self, plan: StepPlan) -> None:
        """Run a step like a real stage, but sleep instead of computing."""
        num_rows = sum(part.num_tokens for part in plan.scheduled)
        matrix = Matrix.of(self._rows)
        if self._previous is not None:
            arguments = ReceiveRowsArguments(matrix, Matrix(), self._previous.address)
            run(self._library, "receive_rows", arguments, num_rows=num_rows)
        begin_s = time.monotonic()
        time.sleep(self._base_s + self._token_s * num_rows)
        self.busy.append((begin_s, time.monotonic()))
        if self._following is not None:
            arguments = SendRowsArguments(matrix, Matrix(), self._following.address)
            run(self._library, "send_rows", arguments, num_rows=num_rows)


def main(spec, reporter, stop) -> int:
    """Answer commands until told to stop."""
    stage = Stage(spec)
    context = zmq.Context()
    commands = Subscriber(context, spec.plan_address)
    replies = ResultPush(context, spec.result_address)
    reporter.mark_ready(WorkerReady(msgspec.structs.replace(FACTS, rank=spec.rank)))
    while True:
        match commands.receive():
            case StepPlan() as plan:
                stage.compute(plan)
                if spec.rank == spec.config.answering_rank:
                    replies.send(result_of(plan))
            case AllocateCache() as command:
                replies.send(CacheReady(command.sequence, spec.rank))
            case WarmUp() as command:
                replies.send(WarmedUp(command.sequence, spec.rank))
            case StopWorker():
                folder = Path(spec.plan_address.removeprefix("ipc://")).parent
                (folder / f"stage-{spec.rank}.json").write_text(json.dumps(stage.busy))
                return 0


if __name__ == "__main__":
    run_child("Worker", WorkerSpec, main)

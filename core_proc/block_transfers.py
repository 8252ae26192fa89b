"""`BlockTransfers`: has the workers load blocks for waiting requests while steps continue."""

from collections.abc import Sequence
from typing import Protocol

from octavo.core_proc.cache.loads import BlockLoad
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.core_proc.workers.commands import CombinedReply, MakeCommand, OnDone
from octavo.protocol.worker_commands import LoadBlocks


class LoadingWorkers(Protocol):
    """The part of the workers' interface that `BlockTransfers` uses."""

    def load_blocks(self, make: MakeCommand, on_done: OnDone) -> None:
        """Have every rank load or store blocks while steps continue.

        Args:
            make: returns the command.
            on_done: called later with the ranks' responses, or with a fault if the workers are lost.
        """


class BlockTransfers:
    """A step hook that sends the loads begun by plans, and finishes each load when all ranks have responded."""

    wake_fds: Sequence[int] = ()

    def __init__(self, scheduler: Scheduler, workers: LoadingWorkers, folder: str = "") -> None:
        self._scheduler = scheduler
        self._workers = workers
        self._folder = folder

    def on_step(self) -> list[ClientEvent]:
        """See `StepHook`."""
        for load in self._scheduler.take_loads():
            self._begin(load)
        return []

    def finish_cause(self, request: Request, cause: FinishCause) -> FinishCause:
        """See `StepHook`."""
        return cause

    def _begin(self, load: BlockLoad) -> None:
        def finish(reply: CombinedReply) -> None:
            missing, missing_states = reply.missing, reply.missing_states
            if reply.fault:
                missing, missing_states = set(load.block_ids), {place for _, place in load.states_from_files}
            self._scheduler.finish_load(load.number, missing, reply.elapsed_s, missing_states)

        self._workers.load_blocks(lambda sequence: load_command(sequence, load, self._folder), finish)


def load_command(sequence: int, load: BlockLoad, folder: str = "") -> LoadBlocks:
    """Return the command that starts a load."""
    return LoadBlocks(
        sequence, load.copies_out, load.copies_in, load.from_host, load.from_files, folder, load.states_from_files
    )

"""`BlockTransfers`: has the workers fill blocks while steps go on, for requests that wait for them."""

from collections.abc import Sequence
from typing import Protocol

from octavo.core_proc.cache.loads import BlockLoad
from octavo.core_proc.request import Request
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.core_proc.scheduler.stop import FinishCause
from octavo.core_proc.workers.commands import Answer, MakeCommand, OnDone
from octavo.protocol.worker_commands import LoadBlocks


class LoadingWorkers(Protocol):
    """What `BlockTransfers` needs of the workers."""

    def load_blocks(self, make: MakeCommand, on_done: OnDone) -> None:
        """Have every rank fill or store blocks while steps go on.

        Args:
            make: returns the command.
            on_done: called later with what they have answered, or that they are lost.
        """


class BlockTransfers:
    """A step hook that sends the loads which plans have begun, and ends them when all ranks have answered."""

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
        def finish(answer: Answer) -> None:
            missing, missing_states = answer.missing, answer.missing_states
            if answer.fault:
                missing, missing_states = set(load.block_ids), {place for _, place in load.states_from_files}
            self._scheduler.finish_load(load.number, missing, answer.elapsed_s, missing_states)

        self._workers.load_blocks(lambda sequence: load_command(sequence, load, self._folder), finish)


def load_command(sequence: int, load: BlockLoad, folder: str = "") -> LoadBlocks:
    """Return the command that begins a load."""
    return LoadBlocks(
        sequence, load.copies_out, load.copies_in, load.from_host, load.from_files, folder, load.states_from_files
    )

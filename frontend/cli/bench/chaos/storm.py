"""`Storm`: the jobs of a run, among what the monkey does meanwhile. Starts no engine, and judges no answer itself."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from octavo.frontend.cli.bench.chaos.crew import Crew
from octavo.frontend.cli.bench.chaos.jobs import Job, Result
from octavo.frontend.cli.bench.chaos.monkey import Monkey
from octavo.frontend.cli.errors import CommandError


class Storm:
    """The jobs of one run, on their way.

    Args:
        crew: that does them; started.
        jobs: in order.
        take: judges a result; True: the job must be done again.
        take_death: told of each job whose process was killed.
        num_ahead: jobs beyond the moment of the next strike that may be begun before it: the storm waits for it.
        monkey: that strikes meanwhile; None: nobody does.
        on_ended: called at each job's end.
    """

    def __init__(
        self,
        crew: Crew,
        jobs: Sequence[Job],
        take: Callable[[Job, Result], bool],
        take_death: Callable[[Job], None],
        num_ahead: int,
        monkey: Monkey | None = None,
        on_ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._crew = crew
        self._jobs = jobs
        self._take = take
        self._take_death = take_death
        self._num_ahead = num_ahead
        self._monkey = monkey
        self._on_ended = on_ended
        self._num_begun = 0
        self._num_ended = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: CommandError) -> None:
        """End the run: it cannot go on."""
        if not self._over.done():
            self._over.set_exception(error)

    async def run(self) -> None:
        """Do all jobs.

        Raises:
            CommandError: a client process cannot go on, or `fail` was called.
        """
        crew = self._crew
        crew.on_result, crew.on_death, crew.on_failure = self._on_result, self._on_death, self.fail
        striking = asyncio.create_task(self._strike(), name="monkey")
        try:
            self._go_on()
            await self._over
            await striking
        finally:
            striking.cancel()

    async def _strike(self) -> None:
        if self._monkey:
            self._monkey.on_done = self._go_on
            await self._monkey.run()

    def _go_on(self) -> None:
        """Begin what may be begun by now."""
        limit = len(self._jobs)
        if self._monkey and self._monkey.next_moment is not None:
            limit = min(limit, self._monkey.next_moment + self._num_ahead)
        if limit > self._num_begun:
            begun, self._num_begun = self._num_begun, limit
            self._crew.add(self._jobs[begun:limit])

    def _on_result(self, job: Job, result: Result) -> None:
        if self._take(job, result):
            self._again(job)
            return
        self._num_ended += 1
        self._on_ended()
        if self._monkey:
            self._monkey.note_ended(self._num_ended)
        if self._num_ended == len(self._jobs) and not self._over.done():
            self._over.set_result(None)

    def _on_death(self, job: Job) -> None:
        self._take_death(job)
        self._again(job)

    def _again(self, job: Job) -> None:
        self._crew.add([msgspec.structs.replace(job, num_retries=job.num_retries + 1)])

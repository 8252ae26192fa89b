"""`JobRunner`: runs jobs on the client pool while faults are injected. Starts no engine, and checks no answers."""

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from octavo.frontend.cli.bench.chaos.client_pool import ClientPool
from octavo.frontend.cli.bench.chaos.fault_injector import FaultInjector
from octavo.frontend.cli.bench.chaos.jobs import ChaosJob, Result
from octavo.frontend.cli.errors import CommandError


class JobRunner:
    """Runs all jobs of a phase.

    Args:
        clients: a started pool.
        jobs: the jobs, in order.
        take: checks a result; returns True if the job must be retried.
        on_client_death: called for each job whose client process was killed.
        num_ahead: number of jobs past the next injection's due point that may start before it is injected.
        injector: injects faults during the run; None: no faults.
        on_ended: called at the end of each job.
    """

    def __init__(
        self,
        clients: ClientPool,
        jobs: Sequence[ChaosJob],
        take: Callable[[ChaosJob, Result], bool],
        on_client_death: Callable[[ChaosJob], None],
        num_ahead: int,
        injector: FaultInjector | None = None,
        on_ended: Callable[[], object] = lambda: None,
    ) -> None:
        self._clients = clients
        self._jobs = jobs
        self._take = take
        self._on_client_death = on_client_death
        self._num_ahead = num_ahead
        self._injector = injector
        self._on_ended = on_ended
        self._num_started = 0
        self._num_ended = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(self, error: CommandError) -> None:
        """End the run with an error."""
        if not self._over.done():
            self._over.set_exception(error)

    async def run(self) -> None:
        """Run all jobs.

        Raises:
            CommandError: a client process failed, or `fail` was called.
        """
        clients = self._clients
        clients.on_result, clients.on_death, clients.on_failure = self._on_result, self._on_death, self.fail
        injecting = asyncio.create_task(self._inject(), name="injector")
        try:
            self._start_jobs()
            await self._over
            await injecting
        finally:
            injecting.cancel()

    async def _inject(self) -> None:
        if self._injector:
            self._injector.on_done = self._start_jobs
            await self._injector.run()

    def _start_jobs(self) -> None:
        """Start the jobs that may start now."""
        limit = len(self._jobs)
        if self._injector and self._injector.next_moment is not None:
            limit = min(limit, self._injector.next_moment + self._num_ahead)
        if limit > self._num_started:
            first, self._num_started = self._num_started, limit
            self._clients.add(self._jobs[first:limit])

    def _on_result(self, job: ChaosJob, result: Result) -> None:
        if self._take(job, result):
            self._retry(job)
            return
        self._num_ended += 1
        self._on_ended()
        if self._injector:
            self._injector.note_ended(self._num_ended)
        if self._num_ended == len(self._jobs) and not self._over.done():
            self._over.set_result(None)

    def _on_death(self, job: ChaosJob) -> None:
        self._on_client_death(job)
        self._retry(job)

    def _retry(self, job: ChaosJob) -> None:
        self._clients.add([msgspec.structs.replace(job, num_retries=job.num_retries + 1)])

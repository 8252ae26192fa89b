"""`Crew`: the client processes of a run, fed with jobs, and replaced when they are killed. Judges no answer."""

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from octavo.frontend.cli.bench.chaos.client import MAX_LINE_BYTES
from octavo.frontend.cli.bench.chaos.jobs import Job, Place, Result
from octavo.frontend.cli.bench.chaos.processes import Process, process_of
from octavo.frontend.cli.errors import CommandError

MODULE = "octavo.frontend.cli.bench.chaos.client"

READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0


@dataclass(eq=False)
class Member:
    """One client process."""

    is_http: bool
    process: asyncio.subprocess.Process
    live: dict[int, Job] = field(default_factory=dict)
    """Jobs that it was given and has not answered."""

    def give(self, job: Job) -> None:
        """Have it do a job."""
        assert self.process.stdin is not None
        self.live[job.number] = job
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")


class Crew:
    """Client processes of both kinds.

    Args:
        url: of the HTTP server.
        address: of the engine.
        num_each: processes of each kind.
        num_callers: requests under way at once, of all together.
        timeout_s: that one request may take.
        errors: where they complain.
    """

    def __init__(
        self, url: str, address: str, num_each: int, num_callers: int, timeout_s: float, errors: BinaryIO
    ) -> None:
        self._url = url
        self._address = address
        self._num_each = num_each
        self._num_callers = max(1, num_callers // (2 * num_each))
        """Of each process."""
        self._timeout_s = timeout_s
        self._errors = errors
        self._members: list[Member] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[bool, deque[Job]] = {True: deque(), False: deque()}
        self._is_closing = False
        self.on_result: Callable[[Job, Result], None] = lambda job, result: None
        self.on_death: Callable[[Job], None] = lambda job: None
        """Called for each job that a process was killed with."""
        self.on_failure: Callable[[CommandError], None] = lambda error: None

    @property
    def applications(self) -> list[Process]:
        """Those that have joined the engine and run."""
        found = [process_of(member.process.pid) for member in self._members if not member.is_http]
        return [process for process in found if process is not None and process.is_running]

    @property
    def num_live(self) -> int:
        """Requests under way."""
        return sum(len(member.live) for member in self._members)

    async def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raises:
            CommandError: one is not.
        """
        kinds = [True, False] * self._num_each
        self._members = list(await asyncio.gather(*(self._spawn(is_http=is_http) for is_http in kinds)))
        self._tasks = [asyncio.create_task(self._follow(place)) for place in range(len(self._members))]

    def add(self, jobs: Iterable[Job]) -> None:
        """Have jobs done, as soon as somebody has a hand free."""
        for job in jobs:
            self._waiting[job.request.is_of_http].append(job)
        for member in self._members:
            self._feed(member)

    async def close(self) -> None:
        """End all processes; harmless the second time."""
        self._is_closing = True
        for member in self._members:
            assert member.process.stdin is not None
            member.process.stdin.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_TIMEOUT_S)
        for member in self._members:
            if member.process.returncode is None:
                member.process.kill()
            await member.process.wait()
        for task in self._tasks:
            task.cancel()

    async def _spawn(self, *, is_http: bool) -> Member:
        """Start a process, and wait until it is ready.

        Raises:
            CommandError: it is not.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", MODULE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._errors,
            limit=MAX_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        place = Place(self._url if is_http else "", self._address, self._timeout_s)
        process.stdin.write(msgspec.json.encode(place) + b"\n")
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
            if not line:
                raise CommandError("a client process did not start", "its log says why")
        except BaseException as error:
            process.kill()
            await process.wait()
            if isinstance(error, TimeoutError):
                raise CommandError("a client process was not ready in time", "its log says why") from None
            raise
        return Member(is_http, process)

    async def _follow(self, place: int) -> None:
        """Take what a process says, and replace it when it is killed, until the end."""
        while not self._is_closing:
            member = self._members[place]
            self._feed(member)
            assert member.process.stdout is not None
            while line := await member.process.stdout.readline():
                if not line.endswith(b"\n"):
                    break  # it was killed in the middle of a word
                result = msgspec.json.decode(line, type=Result)
                self.on_result(member.live.pop(result.number), result)
                self._feed(member)
            code = await member.process.wait()
            lost, member.live = member.live, {}
            if self._is_closing:
                return
            if code >= 0:
                self.on_failure(CommandError(f"a client process ended with code {code}", "its log says why"))
                return
            for job in lost.values():
                self.on_death(job)
            try:
                self._members[place] = await self._spawn(is_http=member.is_http)
            except CommandError as error:
                self.on_failure(error)
                return

    def _feed(self, member: Member) -> None:
        waiting = self._waiting[member.is_http]
        while waiting and len(member.live) < self._num_callers and member.process.returncode is None:
            member.give(waiting.popleft())
